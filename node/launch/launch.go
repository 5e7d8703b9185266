// SPDX-License-Identifier: Apache-2.0

// Package launch is the privileged half of making a sandbox: it clones a first process into new namespaces and
// hands it everything it needs as open files. The other half, package enter, runs in that process.
//
// A sandbox is made in two stages, so that processes which already wait in their namespaces can take the first one
// off the request's path: Shell makes the namespaces, the root and an execd that waits (nothing of a request is known
// yet), Configure turns a shell into one sandbox. On failure each undoes what it did, in reverse; nothing is left.
package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/control"
	"opensandbox.io/node/record"
	"opensandbox.io/node/thread"
	"opensandbox.io/node/wipe"
)

// Host is where sandboxes are made: directories and rights, the same for all of them.
type Host struct {
	// Rootless: sandboxd has a user namespace of one id and cannot map more.
	Rootless bool
	Blocks   *Blocks
	Cgroups  *cgroup.Host
	// Tree names this instance's control groups.
	Tree string
	// Files holds <id>/{upper,work} of every sandbox. It must lie on a nosuid,nodev mount.
	Files string
	// Spools holds <id>/, the output of commands.
	Spools string
	// Run holds <id>/{api,ports}.
	Run string
	// Records gets the files for the sandbox's last words.
	Records record.Dir
	// Group may connect to the sockets.
	Group int
	// dev is where the template of /dev is mounted.
	dev string
	// home is the network namespace of this process, homeName that of its host name.
	home, homeName *os.File
	// program is what first processes execute.
	program *os.File
	// attachLayers is set once this kernel has refused an overlay of detached layers.
	attachLayers atomic.Bool
}

// Prepare makes ready what all sandboxes share. Call it once, in sandboxd's own mount namespace.
func (h *Host) Prepare() error {
	for _, dir := range []string{h.Files, h.Spools} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	h.dev = filepath.Join(h.Run, "dev")
	if err := mountDev(h.dev, h.Rootless); err != nil {
		return fmt.Errorf("template of /dev: %w", err)
	}
	if err := h.Cgroups.Prepare(h.Tree); err != nil {
		return err
	}
	var err error
	if h.home, err = threadNet(); err != nil {
		return err
	}
	if h.homeName, err = os.Open("/proc/thread-self/ns/uts"); err != nil {
		return err
	}
	h.program, err = ownProgram()
	return err
}

// Close removes what Prepare made.
func (h *Host) Close() {
	if h.dev != "" {
		unix.Unmount(h.dev, unix.MNT_DETACH)
		os.Remove(h.dev)
	}
}

// Base is what a sandbox is made of before it is known what for.
type Base struct {
	// Image is the directory of the read-only layer.
	Image string
	// Binds are trees of the host shown read-only, by their path in the sandbox. Own lists paths below them that
	// stay the sandbox's.
	Binds []Bind
	Own   []string
	// Profile is the seccomp profile of commands.
	Profile string
}

// Spec is one sandbox to be made; everything in it has been checked.
type Spec struct {
	ID     string
	Limits cgroup.Limits
	Env    []string
	Cwd    string

	Entrypoint  []string
	TokenSHA256 string
	ShmBytes    int64
}

// Bind is a directory of the host at a path of the sandbox.
type Bind struct{ Source, Target string }

// Failure is an end before the sandbox was ready.
type Failure struct {
	// Code is one of spec/errors.yaml, or empty.
	Code    string
	Step    string
	Message string
}

func (f *Failure) Error() string {
	if f.Step == "" {
		return f.Message
	}
	return f.Step + ": " + f.Message
}

// Shell is a first process that waits in its namespaces for its configuration.
type Shell struct {
	host    *Host
	Block   *Block
	Group   *cgroup.Group
	Process *Process

	control *control.Conn
	user    *os.File // its user namespace; nil when rootless
	name    *os.File // the namespace of its host name
	shm     *os.File // the configuration of its /dev/shm; nil until it is prepared
	limits  cgroup.Limits
	giveWay func() // nil: nobody is more important
	// places are its directories; they and its files among the records change their names with it.
	places   []*place
	lastName string
	laps     *laps
	undo     undo
}

// place is a directory of the shell in one of the host's.
type place struct{ parent, name string }

func (p *place) path() string { return filepath.Join(p.parent, p.name) }

// Slot names the shell's resources: the number of its uid block.
func (s *Shell) Slot() int { return s.Block.N }

// Timings are the milliseconds each stage took.
func (s *Shell) Timings() map[string]float64 { return s.laps.done() }

// Shell makes a slot and a process in it, which from here on prepares itself. Until it is configured its directories
// have the given name: that of the sandbox, or any other UUID. The limits may be changed then.
//
// giveWay is nil when somebody waits for the shell. Otherwise it is called between the steps and may take its time,
// and until the shell is configured its process gets processors only where nobody else wants them.
func (h *Host) Shell(base *Base, name string, limits cgroup.Limits, giveWay func()) (*Shell, error) {
	s := &Shell{host: h, laps: newLaps(), limits: limits, giveWay: giveWay}
	err := s.make(base, name)
	if err != nil {
		s.undo.run()
		return nil, err
	}
	return s, nil
}

func (s *Shell) make(base *Base, name string) error {
	network, err := NewNetwork()
	if err != nil {
		return err
	}
	defer network.Close()
	s.step("slot")
	if err := s.start(network); err != nil {
		return err
	}
	s.step("clone")
	files := new(fileList)
	defer files.close()
	room := &control.Room{
		Profile: base.Profile, Own: base.Own, OneUser: s.host.Rootless, CgroupVersion: s.host.Cgroups.Version(),
	}
	files.borrow(control.FileSys, network.Sys)
	if err := s.root(base, name, room, files); err != nil {
		return err
	}
	if err := s.sockets(name, files); err != nil {
		return err
	}
	if err := s.lastWords(name, files); err != nil {
		return err
	}
	if err := s.cgroupFiles(files); err != nil {
		return err
	}
	room.Files = files.names
	if err := s.control.Send(room, files.files...); err != nil {
		return fmt.Errorf("hand over: %w", err)
	}
	s.laps.lap("root")
	return nil
}

// step notes that one is done, and lets others pass before the next.
func (s *Shell) step(name string) {
	s.laps.lap(name)
	s.pause()
}

func (s *Shell) pause() {
	if s.giveWay != nil {
		s.giveWay()
	}
}

// start makes the slot and the process.
func (s *Shell) start(network *Network) error {
	if err := s.claim(); err != nil {
		return err
	}
	ours, theirs, err := control.Pair()
	if err != nil {
		return err
	}
	s.control = ours
	s.undo.add(func() { s.control.Close() })
	err = s.Group.SpawnInit(func(attr *syscall.SysProcAttr) error {
		var err error
		s.Process, err = s.host.clone(attr, s.Block, network.NS, theirs)
		return err
	})
	theirs.Close()
	if err != nil {
		return fmt.Errorf("clone: %w", err)
	}
	s.undo.add(s.end)
	namespaces := "/proc/" + strconv.Itoa(s.Process.PID) + "/ns/"
	if s.name, err = os.Open(namespaces + "uts"); err != nil {
		return err
	}
	s.undo.add(func() { s.name.Close() })
	if !s.host.Rootless {
		if s.user, err = os.Open(namespaces + "user"); err != nil {
			return err
		}
		s.undo.add(func() { s.user.Close() })
	}
	return nil
}

// claim takes a uid block and makes the control group of the same number. A group that is there already belongs to a
// sandbox that is still being cleared away, even if its block is free again: then the next number is tried.
func (s *Shell) claim() error {
	var passed []*Block
	defer func() {
		for _, block := range passed {
			block.Release()
		}
	}()
	for {
		block, err := s.host.Blocks.Claim()
		if err != nil {
			return err
		}
		group, err := s.host.Cgroups.Create(s.host.Tree, SlotName(block.N), s.limits)
		if errors.Is(err, fs.ErrExist) && len(passed) < slotsToTry {
			passed = append(passed, block)
			continue
		}
		if err != nil {
			block.Release()
			return err
		}
		s.Block, s.Group = block, group
		s.undo.add(block.Release)
		s.undo.add(func() { group.Remove() })
		if err := group.Delegate(s.host.root(block)); err != nil {
			return err
		}
		if s.giveWay != nil {
			if err := group.Yield(); err != nil {
				return err
			}
		}
		s.step("cgroup")
		return nil
	}
}

// slotsToTry bounds how many slots in a row may be found half cleared away.
const slotsToTry = 64

// SlotName is the name of a slot's control group.
func SlotName(n int) string { return strconv.Itoa(n) }

// root is the id on the host of a sandbox's root.
func (h *Host) root(b *Block) int {
	if h.Rootless {
		return 0 // of sandboxd's own user namespace
	}
	return b.UID()
}

// clone starts the first process. It runs on a locked thread that stands in the sandbox's control group.
func (h *Host) clone(attr *syscall.SysProcAttr, block *Block, network, theirs *os.File) (*Process, error) {
	runtime.LockOSThread()
	clean := true
	defer func() {
		// A thread that did not find its way back must not be used again: unlocking is what makes it reusable.
		if clean {
			runtime.UnlockOSThread()
		}
	}()
	// The namespace belongs to our user namespace, so it has to be joined before the clone makes another.
	if err := unix.Setns(int(network.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("join the network namespace: %w", err)
	}
	defer func() { clean = unix.Setns(int(h.home.Fd()), unix.CLONE_NEWNET) == nil && clean }()
	if !h.Rootless {
		back, err := becomeOwner(block.UID())
		if err != nil {
			return nil, fmt.Errorf("take the id of the sandbox: %w", err)
		}
		defer func() { clean = back() == nil && clean }()
	}
	null, err := nullBehind(h.program)
	if err != nil {
		return nil, err
	}
	defer null.Close()

	size := BlockSize
	if h.Rootless {
		size = 1
	}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: h.root(block), Size: size}}
	pidfd := -1
	attr.Cloneflags |= unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	attr.UidMappings, attr.GidMappings = ids, ids
	attr.GidMappingsEnableSetgroups = !h.Rootless
	// The child is still our id 0, which the map does not contain.
	attr.Credential = &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: h.Rootless}
	attr.Setsid = true
	attr.PidFD = &pidfd
	var pid int
	// Also from the pool, whose thread has a low priority: a sandbox would keep that for life.
	thread.Normally(func() {
		pid, _, err = syscall.StartProcess(fdPath(h.program), []string{control.InitName}, &syscall.ProcAttr{
			Dir: "/",
			// One processor for its scheduler: five threads fewer. Without the second variable the Go runtime keeps a
			// file of the host's control groups open.
			Env:   []string{"GOMAXPROCS=1", "GODEBUG=containermaxprocs=0"},
			Files: []uintptr{null.Fd(), null.Fd(), null.Fd(), theirs.Fd(), block.lock.Fd()},
			Sys:   attr,
		})
	})
	if err != nil {
		return nil, err
	}
	return newProcess(pid, pidfd, true)
}

// becomeOwner gives this thread the effective id that will own the sandbox's user namespace, with all capabilities
// kept, and returns the way back. The kernel counts what has no control group (inotify watches, queued signals, timers,
// message queues) against the owner of a namespace as well: owned by root, one sandbox could use up root's share,
// and with it that of every other sandbox.
func becomeOwner(uid int) (back func() error, err error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var saved [2]unix.CapUserData
	if err := unix.Capget(&header, &saved[0]); err != nil {
		return nil, err
	}
	// The system calls themselves: Go's wrappers change every thread. Leaving id 0 empties the effective set, the
	// permitted one stays as long as the real id is 0.
	change := func(euid int) error {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(euid), ^uintptr(0)); errno != 0 {
			return errno
		}
		return unix.Capset(&header, &saved[0])
	}
	back = func() error { return change(0) }
	if err := change(uid); err != nil {
		return nil, errors.Join(err, back())
	}
	return back, nil
}

// end kills the process and waits until its whole pid namespace is gone.
func (s *Shell) end() {
	s.Process.Kill()
	s.Process.Wait()
	s.Process.Close()
}

// Close gives up on the shell: its process dies and its slot is free again.
func (s *Shell) Close() { s.undo.run() }

// Alive tells whether the process is still there.
func (s *Shell) Alive() bool {
	alive := false
	err := s.Process.control(func(pidfd int) { alive = !exited(pidfd) })
	return err == nil && alive
}

// Prepared waits until nothing is left to do before a request comes. A shell that fails here is of no use any more:
// the caller closes it.
func (s *Shell) Prepared(ctx context.Context) error {
	if s.shm != nil {
		return nil
	}
	files, err := s.await(ctx, control.Prepared)
	if err != nil {
		return err
	}
	if len(files) != 1 {
		return fmt.Errorf("prepared with %d open files", len(files))
	}
	s.shm = files[0]
	s.undo.add(func() { s.shm.Close() })
	s.laps.lap("enter")
	return nil
}

// Configure turns the shell into a sandbox and returns when execd answers, or with ErrEnded when its first process
// has ended by then. In both cases the caller holds Block, Group, Process and the sandbox's files from here on; on
// any other error everything is undone.
func (s *Shell) Configure(ctx context.Context, spec *Spec) (err error) {
	defer func() {
		switch {
		case errors.Is(err, ErrEnded):
			s.release()
		case err != nil:
			s.undo.run()
		}
	}()
	waited := s.shm != nil
	if waited {
		s.laps = newLaps() // what came before was not on the way of this request
	}
	if err := s.rename(spec.ID); err != nil {
		return err
	}
	if s.giveWay != nil {
		if err := s.Group.Insist(); err != nil {
			return err
		}
	}
	if spec.Limits != s.limits {
		if err := s.Group.Limit(spec.Limits); err != nil {
			return err
		}
	}
	if err := s.setHostname(spec.ID[:12]); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if err := s.Prepared(ctx); err != nil {
		return err
	}
	if err := s.resizeShm(spec.ShmBytes); err != nil {
		return fmt.Errorf("size of /dev/shm: %w", err)
	}
	err = s.control.Send(&control.Setup{
		Env: spec.Env, Cwd: spec.Cwd, Entrypoint: spec.Entrypoint, TokenSHA256: spec.TokenSHA256,
	})
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return ErrEnded
	}
	if err != nil {
		return fmt.Errorf("hand over: %w", err)
	}
	if waited {
		s.laps.lap("pooled")
	}
	if _, err := s.await(ctx, control.Ready); err != nil {
		return err
	}
	s.laps.lap("ready")
	return nil
}

// rename gives the shell's directories the name of the sandbox. Sockets, mounts and open directories in them stay
// what they are.
func (s *Shell) rename(id string) error {
	for _, p := range s.places {
		if p.name == id {
			continue
		}
		if err := os.Rename(p.path(), filepath.Join(p.parent, id)); err != nil {
			return err
		}
		p.name = id
	}
	if s.lastName == id {
		return nil
	}
	if err := s.host.Records.Rename(s.lastName, id); err != nil {
		return err
	}
	s.lastName = id
	return nil
}

// setHostname does it from outside: the process has given up the right.
func (s *Shell) setHostname(name string) error {
	runtime.LockOSThread()
	if err := unix.Setns(int(s.name.Fd()), unix.CLONE_NEWUTS); err != nil {
		runtime.UnlockOSThread()
		return err
	}
	err := unix.Sethostname([]byte(name))
	if back := unix.Setns(int(s.host.homeName.Fd()), unix.CLONE_NEWUTS); back != nil {
		return errors.Join(err, back) // still locked: the thread ends with its goroutine
	}
	runtime.UnlockOSThread()
	return err
}

func (s *Shell) resizeShm(bytes int64) error {
	fd := int(s.shm.Fd())
	if err := unix.FsconfigSetString(fd, "size", strconv.FormatInt(bytes, 10)); err != nil {
		return err
	}
	return unix.FsconfigReconfigure(fd)
}

// ErrEnded says that the first process ended before execd answered; its end file may say how.
var ErrEnded = errors.New("the sandbox has ended")

// await waits until the process has come so far, and returns the files it sent.
func (s *Shell) await(ctx context.Context, stage control.Stage) ([]*os.File, error) {
	stop := context.AfterFunc(ctx, func() { s.control.Socket().SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var progress control.Progress
	files, err := s.control.Receive(&progress)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET):
		return nil, ErrEnded
	case err != nil:
		return nil, err
	case progress.Stage == stage:
		return files, nil
	}
	for _, f := range files {
		f.Close()
	}
	return nil, &Failure{Code: progress.Code, Step: progress.Step, Message: progress.Message}
}

// Commit lets the sandbox outlive this process. A first process that is gone meanwhile is no error: the caller, who
// waits for its end anyway, will hear of it.
func (s *Shell) Commit() {
	s.control.Send(control.Commit{Committed: true})
	s.release()
}

// release lets go of what only the making needed.
func (s *Shell) release() {
	for _, f := range []*os.File{s.name, s.user, s.shm} {
		if f != nil {
			f.Close()
		}
	}
	s.control.Close()
	s.undo = undo{}
}

// directory makes one of the shell's.
func (s *Shell) directory(parent, name string, mode os.FileMode) (string, error) {
	p := &place{parent, name}
	if err := os.Mkdir(p.path(), mode); err != nil {
		return "", err
	}
	s.places = append(s.places, p)
	s.undo.add(func() { wipe.Tree(p.path()) })
	return p.path(), nil
}

func (s *Shell) root(base *Base, name string, room *control.Room, files *fileList) error {
	dir, err := s.directory(s.host.Files, name, 0o700)
	if err != nil {
		return err
	}
	for _, name := range []string{"upper", "work"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			return err
		}
	}
	root, err := s.host.overlay(base.Image, dir, s.user)
	if err != nil {
		return err
	}
	files.give(control.FileRoot, root)
	s.pause()
	for _, bind := range base.Binds {
		// Not idmapped: to these files the sandbox's root is a stranger and sees what everybody may see. What is
		// mounted below stays away, but in a user namespace the kernel hands out a tree only with what covers it.
		var below uint
		if s.host.Rootless {
			below = unix.AT_RECURSIVE
		}
		tree, err := cloneTree(bind.Source, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV, nil, below)
		if err != nil {
			return err
		}
		room.Binds = append(room.Binds, bind.Target)
		files.give(control.FileBind, tree)
	}
	// Rootless, the nodes are binds of their own.
	dev, err := cloneTree(s.host.dev, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC, nil, unix.AT_RECURSIVE)
	if err != nil {
		return err
	}
	files.give(control.FileDev, dev)

	spool, err := s.directory(s.host.Spools, name, 0o700)
	if err != nil {
		return err
	}
	opened, err := spoolDir(spool, s.user)
	if err != nil {
		return err
	}
	files.give(control.FileSpool, opened)
	return nil
}

// sockets binds what the sandbox will listen on, so that nobody who connects comes too early.
func (s *Shell) sockets(name string, files *fileList) error {
	dir, err := s.directory(s.host.Run, name, 0o750)
	if err != nil {
		return err
	}
	if err := os.Chown(dir, -1, s.host.Group); err != nil {
		return err
	}
	for _, name := range []string{control.FileAPI, control.FilePorts} {
		path := filepath.Join(dir, name)
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return err
		}
		listener.SetUnlinkOnClose(false)
		err = errors.Join(os.Chown(path, -1, s.host.Group), os.Chmod(path, 0o660))
		var file *os.File
		if err == nil {
			file, err = listener.File()
		}
		listener.Close()
		if err != nil {
			return err
		}
		files.give(name, file)
	}
	return nil
}

// lastWords makes the files for how it ended and for execd's own log.
func (s *Shell) lastWords(name string, files *fileList) error {
	s.lastName = name
	s.undo.add(func() { s.host.Records.Remove(s.lastName) })
	end, err := s.host.Records.CreateEnd(name)
	if err != nil {
		return err
	}
	files.give(control.FileEnd, end)
	log, err := s.host.Records.CreateLog(name)
	if err != nil {
		return err
	}
	files.give(control.FileLog, log)
	return nil
}

func (s *Shell) cgroupFiles(files *fileList) error {
	entry, err := s.Group.PayloadEntry()
	if err != nil {
		return err
	}
	for _, f := range entry.Files() {
		files.give(control.FileCgroupEntry, f)
	}
	meter, err := s.Group.Meter()
	if errors.Is(err, cgroup.ErrNoMeter) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, f := range meter.Files() {
		files.give(control.FileCgroupMeter, f)
	}
	return nil
}

// fileList collects the open files of a Setup.
type fileList struct {
	names []string
	files []*os.File
	ours  []*os.File
}

// give adds a file that is closed once it was sent.
func (l *fileList) give(name string, f *os.File) {
	l.ours = append(l.ours, f)
	l.borrow(name, f)
}

// borrow adds a file that stays open.
func (l *fileList) borrow(name string, f *os.File) {
	l.names = append(l.names, name)
	l.files = append(l.files, f)
}

func (l *fileList) close() {
	for _, f := range l.ours {
		f.Close()
	}
}

// undo is what to do if the next step fails, newest first.
type undo struct{ steps []func() }

func (u *undo) add(step func()) { u.steps = append(u.steps, step) }

func (u *undo) run() {
	for len(u.steps) > 0 {
		last := len(u.steps) - 1
		step := u.steps[last]
		u.steps = u.steps[:last]
		step()
	}
}

// laps is a stopwatch.
type laps struct {
	start, last time.Time
	times       map[string]float64
}

func newLaps() *laps {
	now := time.Now()
	return &laps{start: now, last: now, times: map[string]float64{}}
}

func (l *laps) lap(name string) {
	now := time.Now()
	l.times[name] = milliseconds(now.Sub(l.last))
	l.last = now
}

func (l *laps) done() map[string]float64 {
	l.times["total"] = milliseconds(time.Since(l.start))
	return l.times
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
