// SPDX-License-Identifier: Apache-2.0

// Package spawn starts processes and collects their ends. It exists beside os/exec for two reasons: what a
// process is confined by (seccomp filter, cgroup v1 membership) belongs to the OS thread that forks it, so forks
// happen on one dedicated locked thread; and as pid 1 there are orphans to reap, which os/exec cannot live with.
package spawn

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Confinement is what every started process inherits.
type Confinement struct {
	// EnterThread runs once on the dedicated thread before it forks for the first time; what it does to the thread
	// (a seccomp filter, a cgroup v1) its children are born with. Nil: nothing.
	EnterThread func() error
	// CgroupFD is the cgroup v2 directory children are cloned into; 0 or less: none.
	CgroupFD int
	// Keep are the capabilities that children may have; nil: all of the daemon's. What Apart needs is not theirs.
	Keep *[2]unix.CapUserData
	// Filter is the seccomp program of children; nil: none beyond what the thread has. no_new_privs must be set. It is
	// loaded into the thread once, or, together with CgroupFD, into each child before it executes its program: a
	// filter must refuse clone3, whose flags it cannot see, and clone3 is the only way into a cgroup v2.
	Filter []unix.SockFilter
}

// errNoClone3 says what a cgroup v2 needs.
var errNoClone3 = errors.New("the thread may not call clone3, which a cgroup v2 needs: give the seccomp program as Filter instead of loading it in EnterThread")

// Spec says what to start. Everything a child gets is in it: nothing is inherited by accident.
type Spec struct {
	Path string   // program, absolute or relative to Dir; not searched for
	Args []string // with the program's name first
	Env  []string // exactly this
	// Dir is an open directory (O_PATH is enough), because a path could be exchanged for one that leads through
	// the daemon's own file descriptors. Nil: the daemon's directory.
	Dir *os.File

	Stdin, Stdout, Stderr *os.File // nil: /dev/null
	// Extra are the descriptors 3 and up.
	Extra []*os.File
	// Terminal makes Stdin, which must be a terminal, the controlling one.
	Terminal bool

	// Credential changes the user; nil keeps the daemon's.
	Credential *syscall.Credential

	// Apart and Inside concern namespaces; at most one is given, usually none.
	Apart  *Apart
	Inside *Inside

	// OOMScoreAdj makes the kernel prefer this process when memory runs out; 0 leaves it.
	OOMScoreAdj int
}

// Spawner starts processes from one thread and reaps them. It lives as long as the daemon.
type Spawner struct {
	confinement Confinement
	null        *os.File
	requests    chan request
	adopts      bool // orphans become our children: reap whatever ends

	// mu is held from before a fork until the child is in live, so the reaper never meets a child it does not know.
	mu   sync.Mutex
	live map[int]*Process

	children  chan os.Signal
	closed    chan struct{}
	closeOnce sync.Once
	ended     sync.WaitGroup
}

type request struct {
	spec  Spec
	reply chan<- answer
}

type answer struct {
	pid   int
	pidfd int // -1 where the kernel gives none
	err   error
}

// ErrClosed is returned by Start after Close.
var ErrClosed = errors.New("spawn: closed")

// New makes the dedicated thread and lets it enter its confinement. As pid 1, or where this process asked to be a
// child subreaper, every child that ends is reaped, so no other code of the process may wait for children there.
func New(c Confinement) (*Spawner, error) {
	// Go opens everything close-on-exec; what an ancestor left open is not, and is not for the children either.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil && err != unix.ENOSYS {
		return nil, fmt.Errorf("spawn: close-on-exec: %w", err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("spawn: %w", err)
	}
	s := &Spawner{
		confinement: c, null: null, requests: make(chan request), live: map[int]*Process{},
		children: make(chan os.Signal, 1), closed: make(chan struct{}), adopts: adoptsOrphans(),
	}
	entered := make(chan error)
	s.ended.Add(2)
	go s.fork(entered)
	if err := <-entered; err != nil {
		s.ended.Done()
		s.ended.Wait()
		_ = null.Close()
		return nil, fmt.Errorf("spawn: entering the confinement: %w", err)
	}
	signal.Notify(s.children, unix.SIGCHLD)
	go s.reap()
	return s, nil
}

// Close ends the thread and stops reaping. It does not touch running processes: as pid 1 its caller exits and
// takes them along, elsewhere the caller has ended them.
func (s *Spawner) Close() {
	s.closeOnce.Do(func() {
		signal.Stop(s.children)
		close(s.closed)
	})
	s.ended.Wait()
	_ = s.null.Close()
}

func adoptsOrphans() bool {
	if os.Getpid() == 1 {
		return true
	}
	var on int32
	err := prctlGet(unix.PR_GET_CHILD_SUBREAPER, &on)
	return err == nil && on != 0
}

// fork is the dedicated thread. It is never unlocked: the runtime destroys a locked thread whose goroutine ends,
// and with it the confinement that must not reach other goroutines.
func (s *Spawner) fork(entered chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// Not the main thread: it stands for the whole process in /proc and in the accounting of memory, and it cannot
		// be destroyed. While we hold it, the next goroutine is on another one.
		other := make(chan error)
		go s.fork(other)
		err := <-other
		runtime.UnlockOSThread()
		entered <- err
		return
	}
	defer s.ended.Done()
	if s.confinement.EnterThread != nil {
		if err := s.confinement.EnterThread(); err != nil {
			entered <- err
			return
		}
	}
	if s.confinement.Keep != nil {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		if err := unix.Capset(&header, &s.confinement.Keep[0]); err != nil {
			entered <- err
			return
		}
	}
	if err := s.filterThread(); err != nil {
		entered <- err
		return
	}
	entered <- nil
	for {
		select {
		case <-s.closed:
			return
		case r := <-s.requests:
			pid, pidfd, err := s.forkExec(&r.spec)
			r.reply <- answer{pid, pidfd, err}
		}
	}
}

// filterThread loads the filter where it belongs to the thread, and makes sure that children can be cloned.
func (s *Spawner) filterThread() error {
	if s.confinement.CgroupFD > 0 {
		if !clone3Allowed() {
			return errNoClone3
		}
		return nil
	}
	if len(s.confinement.Filter) == 0 {
		return nil
	}
	return loadFilter(s.confinement.Filter)
}

func (s *Spawner) forkExec(spec *Spec) (pid, pidfd int, err error) {
	if s.confinement.CgroupFD > 0 && len(s.confinement.Filter) > 0 {
		return s.cloneExec(spec)
	}
	pidfd = -1
	attr := &syscall.ProcAttr{
		Env:   spec.Env,
		Files: s.files(spec),
		Sys: &syscall.SysProcAttr{
			// An own session is an own process group too, and takes the controlling terminal away.
			Setsid:     true,
			Setctty:    spec.Terminal, // Ctty is 0: the standard input
			Credential: spec.Credential,
			PidFD:      &pidfd,
		},
	}
	if spec.Dir != nil {
		// Resolved in the child, where the descriptor is still open: close-on-exec comes later.
		attr.Dir = "/proc/self/fd/" + strconv.Itoa(int(spec.Dir.Fd()))
	}
	if s.confinement.CgroupFD > 0 {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, s.confinement.CgroupFD
	}
	pid, err = syscall.ForkExec(spec.Path, spec.Args, attr)
	runtime.KeepAlive(spec)
	return pid, pidfd, err
}

// files are the descriptors of a child, in their order.
func (s *Spawner) files(spec *Spec) []uintptr {
	files := []uintptr{s.fd(spec.Stdin), s.fd(spec.Stdout), s.fd(spec.Stderr)}
	for _, f := range spec.Extra {
		files = append(files, s.fd(f))
	}
	return files
}

func (s *Spawner) fd(f *os.File) uintptr {
	if f == nil {
		return s.null.Fd()
	}
	return f.Fd()
}

// Start runs the program. The error is the kernel's (a syscall.Errno) when it refused to fork or to execute.
func (s *Spawner) Start(spec Spec) (*Process, error) {
	reply := make(chan answer, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	mark := nextMark()
	if spec.Apart != nil || spec.Inside != nil {
		reply <- s.forkElsewhere(&spec)
	} else {
		select {
		case s.requests <- request{spec, reply}:
		case <-s.closed:
			return nil, ErrClosed
		}
	}
	a := <-reply
	if a.err != nil {
		return nil, a.err
	}
	p := &Process{Pid: a.pid, Started: time.Now(), done: make(chan struct{}), mark: mark}
	s.live[a.pid] = p
	s.await(p, a.pidfd)
	if spec.OOMScoreAdj != 0 {
		// Best effort: a process that is gone already, or a /proc that refuses, only loses a preference.
		_ = os.WriteFile("/proc/"+strconv.Itoa(a.pid)+"/oom_score_adj", strconv.AppendInt(nil, int64(spec.OOMScoreAdj), 10), 0)
	}
	return p, nil
}

// await collects the end of one process as soon as it is there. The signal would do, and does for orphans and on kernels
// without pidfds, but takes some threads longer: through the one it interrupts, the one that gets signals, the reaper.
func (s *Spawner) await(p *Process, pidfd int) {
	if pidfd < 0 {
		return
	}
	if err := unix.SetNonblock(pidfd, true); err != nil { // or the runtime's poller does not take it
		_ = unix.Close(pidfd)
		return
	}
	file := os.NewFile(uintptr(pidfd), "pidfd")
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return
	}
	go func() {
		defer file.Close()
		_ = raw.Read(func(uintptr) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.collect(p.Pid, p)
			return p.reaped
		})
	}()
}

// reap collects ends when the kernel says that there are some.
func (s *Spawner) reap() {
	defer s.ended.Done()
	for {
		select {
		case <-s.closed:
			return
		case <-s.children:
		}
		s.mu.Lock()
		if s.adopts {
			s.reapAll()
		} else {
			for pid, p := range s.live {
				s.collect(pid, p)
			}
		}
		s.mu.Unlock()
	}
}

// reapAll looks at whoever has ended without reaping, so that a registered process is collected under its own
// lock, and everyone else, an orphan, at once.
func (s *Spawner) reapAll() {
	for {
		pid, err := peekEnded()
		if err != nil || pid == 0 {
			return
		}
		if p := s.live[pid]; p != nil {
			s.collect(pid, p)
			continue
		}
		var status syscall.WaitStatus
		if _, err := wait4(pid, &status, syscall.WNOHANG, nil); err != nil {
			return
		}
	}
}

// collect reaps one of ours if it has ended.
func (s *Spawner) collect(pid int, p *Process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return
	}
	var status syscall.WaitStatus
	got, err := wait4(pid, &status, syscall.WNOHANG, &p.usage)
	switch {
	case err != nil:
		// ECHILD: somebody else of this process took it. The end is known to have happened, not how.
		p.lost = true
	case got != pid:
		return
	}
	p.status, p.reaped = status, true
	delete(s.live, pid)
	close(p.done)
}

func wait4(pid int, status *syscall.WaitStatus, options int, usage *syscall.Rusage) (int, error) {
	for {
		got, err := syscall.Wait4(pid, status, options, usage)
		if err != syscall.EINTR {
			return got, err
		}
	}
}
