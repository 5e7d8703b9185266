// SPDX-License-Identifier: Apache-2.0

// Package enter is the inside half of making a sandbox: the first process of its namespaces builds the root
// filesystem out of the open files it is given, gives up its rights, and becomes execd without another exec.
//
// It runs in two stages. In the first it builds everything that does not depend on a request, up to an execd that
// waits, so such a process can be kept ready. The second turns it into one sandbox.
package enter

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"os/signal"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/control"
	"opensandbox.io/node/execd"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/seccomp"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

// Wanted tells whether this process was started as a sandbox's first one.
func Wanted() bool {
	return len(os.Args) == 1 && os.Args[0] == control.InitName && os.Getpid() == 1
}

// init gives the process the name that ps shows; the exec through an open file left a number there. Only package
// initialisation is sure to run on the main thread, whose name it is.
func init() {
	if Wanted() {
		name := [16]byte{}
		copy(name[:], "execd")
		unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name)), 0, 0, 0)
	}
}

// Main is that process's life; it does not return. version is what execd reports.
func Main(version string) {
	conn, err := shell()
	if err != nil {
		os.Exit(1)
	}
	var room control.Room
	files := receive(conn, &room)
	s := &sandbox{room: &room, conn: conn, files: byName(room.Files, files), version: version}
	prepared, err := s.prepare()
	if err == nil {
		var setup control.Setup
		receive(conn, &setup)
		err = s.become(prepared, &setup)
	}
	if err != nil {
		conn.Send(progress(err))
		os.Exit(1)
	}
	os.Exit(0)
}

// receive waits for the next message. Its absence means that sandboxd is gone, or has no use for this shell.
func receive(conn *control.Conn, message any) []*os.File {
	files, err := conn.Receive(message)
	if err != nil {
		os.Exit(0)
	}
	return files
}

// shell keeps what was meant for this process and lets go of everything else.
func shell() (*control.Conn, error) {
	if err := unix.CloseRange(control.BlockFD+1, math.MaxUint32, 0); err != nil {
		return nil, err
	}
	unix.CloseOnExec(control.BlockFD)
	heedSignals()
	os.Clearenv()
	unix.Umask(0o022)
	return control.Inherited(control.SocketFD)
}

// sandbox is one on its way.
type sandbox struct {
	room    *control.Room
	conn    *control.Conn
	files   openFiles
	version string
	signals <-chan os.Signal
	hosts   *os.File // /etc/hosts, which gets the sandbox's name when it has one; nil: the image has none
	name    *os.File // /etc/hostname, which gets it too; nil: it is a link of the image, or there is no /etc
}

// prepare is the first stage: build the root, give up all rights, have execd ready.
func (s *sandbox) prepare() (*execd.Prepared, error) {
	s.signals = outlastSignals()
	if err := s.takeLog(); err != nil {
		return nil, fail("log", err)
	}
	err := s.buildRoot()
	if err != nil {
		return nil, err
	}
	// Opened here, because the first opening copies it into the writable layer: a sandbox that is asked for does not wait
	// for that. Nobody has run yet who could have put a link there.
	if s.hosts, err = os.OpenFile("/etc/hosts", os.O_WRONLY|os.O_APPEND|unix.O_NOFOLLOW, 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fail("hosts", err)
	}
	if s.name, err = openHostname(); err != nil {
		return nil, fail("hostname", err)
	}
	// Once the rights are gone only sandboxd, which holds them all, can still change the size.
	shm, err := unix.Fspick(unix.AT_FDCWD, "/dev/shm", unix.FSPICK_CLOEXEC)
	if err != nil {
		return nil, fail("shm", err)
	}
	size := os.NewFile(uintptr(shm), "shm")
	defer size.Close()
	if err := giveUpRights(s.isolates()); err != nil {
		return nil, err
	}
	prepared, err := s.prepareExecd()
	if err != nil {
		return nil, err
	}
	return prepared, s.conn.Send(control.Progress{Stage: control.Prepared}, size)
}

// openHostname empties /etc/hostname, for the same reason and at the same time. An image may have anything there; nil
// when it is no file.
func openHostname() (*os.File, error) {
	f, err := os.OpenFile("/etc/hostname", os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o644)
	for _, other := range []error{unix.ENOENT, unix.ELOOP, unix.EISDIR, unix.ENXIO} {
		if errors.Is(err, other) {
			return nil, nil
		}
	}
	if err != nil {
		return nil, err
	}
	return f, f.Chmod(0o644) // whatever the mask is
}

// become is the second stage: it lives until the entry point ends.
func (s *sandbox) become(prepared *execd.Prepared, setup *control.Setup) error {
	go s.leaveUnlessCommitted()
	if err := findEntrypoint(setup); err != nil {
		return err
	}
	if err := s.nameItself(); err != nil {
		return fail("hosts", err)
	}
	end, err := s.files.file(control.FileEnd)
	if err != nil {
		return fail("end", err)
	}
	task := execd.Task{End: end, Env: setup.Env, Cwd: setup.Cwd, Entrypoint: setup.Entrypoint}
	if n, err := hex.Decode(task.TokenSHA256[:], []byte(setup.TokenSHA256)); err != nil || n != len(task.TokenSHA256) {
		return fail("token", errors.New("its digest is not 64 hex digits"))
	}
	if _, err := prepared.Run(context.Background(), task); err != nil {
		return fail("execd", err)
	}
	return nil
}

// nameItself makes the sandbox's host name, which sandboxd has set, one that programs can look up.
func (s *sandbox) nameItself() error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	if s.hosts != nil {
		_, err = fmt.Fprintf(s.hosts, "127.0.0.1\t%[1]s\n::1\t%[1]s\n", name)
		err = errors.Join(err, s.hosts.Close())
	}
	if s.name != nil {
		_, written := s.name.WriteString(name + "\n")
		err = errors.Join(err, written, s.name.Close())
	}
	return err
}

// heedSignals sets every signal that somebody up the line chose to ignore (nohup, a shell's background job, make, which
// by way of posix_spawn ignores even those of the C library) back to its default, before programs inherit that.
func heedSignals() {
	const ignored = 1 // SIG_IGN
	for sig := uintptr(1); sig <= 64; sig++ {
		var action [4]uintptr // the kernel's sigaction: handler, flags, restorer, mask
		_, _, failed := unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, 0, uintptr(unsafe.Pointer(&action)), 8, 0, 0)
		if failed == 0 && action[0] == ignored {
			action = [4]uintptr{}
			unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
		}
	}
}

// outlastSignals keeps what a program inside sends to pid 1 from ending the sandbox; sandboxd, outside, uses SIGKILL.
// It gives those that are meant for the entry point.
func outlastSignals() <-chan os.Signal {
	spawn.OutlastSignals()
	meant := make(chan os.Signal, 16)
	signal.Notify(meant, execd.PassedOn...)
	return meant
}

// leaveUnlessCommitted ends the sandbox if sandboxd goes before it has put it on record: nobody would ever look for
// it. Afterwards the end of the conversation means nothing.
func (s *sandbox) leaveUnlessCommitted() {
	var order control.Commit
	if _, err := s.conn.Receive(&order); err != nil || !order.Committed {
		os.Exit(1)
	}
	s.conn.Close()
}

// takeLog makes the file for last words standard output and error; a panic goes there too.
func (s *sandbox) takeLog() error {
	f, err := s.files.file(control.FileLog)
	if err != nil {
		return err
	}
	defer f.Close()
	return errors.Join(unix.Dup3(int(f.Fd()), 1, 0), unix.Dup3(int(f.Fd()), 2, 0))
}

// logMax is what execd may write to the host's log in its whole life: programs inside can make it complain.
const logMax = 1 << 20

// bounded passes on so many bytes and drops the rest. slog calls it under a lock.
type bounded struct {
	w    io.Writer
	left int
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.left < len(p) {
		b.left = 0
		return len(p), nil
	}
	b.left -= len(p)
	return b.w.Write(p)
}

func (s *sandbox) prepareExecd() (*execd.Prepared, error) {
	api, err := s.files.listener(control.FileAPI)
	if err != nil {
		return nil, fail("api socket", err)
	}
	ports, err := s.files.listener(control.FilePorts)
	if err != nil {
		return nil, fail("ports socket", err)
	}
	spool, err := s.files.file(control.FileSpool)
	if err != nil {
		return nil, fail("spool", err)
	}
	confinement, err := s.confinement()
	if err != nil {
		return nil, fail("confinement", err)
	}
	config := execd.Config{
		API: api, Ports: ports, Spool: spool, Confinement: confinement, Signals: s.signals,
		Ready: func(int) {
			s.conn.Send(control.Progress{Stage: control.Ready})
		},
		Log:     reply.NewLog(&bounded{w: os.Stderr, left: logMax}, "execd", slog.LevelWarn),
		Version: s.version,
	}
	if files := s.files[control.FileCgroupMeter]; len(files) > 0 {
		config.Meter = cgroup.MeterFromFiles(s.room.CgroupVersion, files)
	}
	prepared, err := execd.Prepare(config)
	if err != nil {
		return nil, fail("execd", err)
	}
	return prepared, nil
}

// confinement is what distinguishes what execd starts from execd itself.
func (s *sandbox) confinement() (spawn.Confinement, error) {
	entry := cgroup.EntryFromFiles(s.room.CgroupVersion, s.files[control.FileCgroupEntry])
	profile := seccomp.Strict
	if s.nested() {
		profile = seccomp.Nested
	}
	program, err := seccomp.Program(profile)
	c := spawn.Confinement{EnterThread: entry.EnterThread, CgroupFD: entry.CgroupFD(), Filter: program}
	if s.isolates() {
		keep := keptCapabilities()
		c.Keep = &keep
	}
	return c, err
}

func (s *sandbox) nested() bool { return s.room.Profile == string(wire.LaunchRequestProfileNested) }

// isolates: execd may make namespaces for isolated runs. What it starts otherwise is as confined as ever.
func (s *sandbox) isolates() bool { return s.room.Profile == string(wire.LaunchRequestProfileIsolated) }

// openFiles are those that came with a message, by name.
type openFiles map[string][]*os.File

func (o openFiles) file(name string) (*os.File, error) {
	if files := o[name]; len(files) > 0 {
		return files[0], nil
	}
	return nil, fmt.Errorf("no open file for %s came along", name)
}

func (o openFiles) listener(name string) (net.Listener, error) {
	f, err := o.file(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return net.FileListener(f)
}

// findEntrypoint makes a missing program an error of the request instead of a sandbox that ends at once.
func findEntrypoint(setup *control.Setup) error {
	program := setup.Entrypoint[0]
	candidates := []string{program}
	if !strings.Contains(program, "/") {
		candidates = nil
		for _, variable := range setup.Env {
			if path, ok := strings.CutPrefix(variable, "PATH="); ok {
				candidates = nil // the last one counts, as in a shell
				for dir := range strings.SplitSeq(path, ":") {
					candidates = append(candidates, dir+"/"+program)
				}
			}
		}
	} else if !strings.HasPrefix(program, "/") {
		candidates = []string{setup.Cwd + "/" + program}
	}
	why := "is not in the image"
	for _, path := range candidates {
		info, err := os.Stat(path)
		switch {
		case err != nil:
			continue
		case info.IsDir():
			why = "is a directory"
		case info.Mode()&0o111 == 0:
			why = "is not executable"
		default:
			return nil
		}
	}
	return &failure{control.Progress{
		Stage: control.Failed, Code: string(wire.CodeSandboxInvalidEntrypoint),
		Message: fmt.Sprintf("The entry point %q %s.", program, why),
	}}
}

// failure is an error that sandboxd is told in parts.
type failure struct{ control.Progress }

func (f *failure) Error() string { return f.Step + ": " + f.Message }

func fail(step string, err error) error {
	return &failure{control.Progress{Stage: control.Failed, Step: step, Message: err.Error()}}
}

func progress(err error) control.Progress {
	var f *failure
	if errors.As(err, &f) {
		return f.Progress
	}
	return control.Progress{Stage: control.Failed, Message: err.Error()}
}

func byName(names []string, files []*os.File) openFiles {
	named := openFiles{}
	for i, f := range files {
		if i < len(names) {
			named[names[i]] = append(named[names[i]], f)
		}
	}
	return named
}
