// SPDX-License-Identifier: Apache-2.0

package spawn

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The standard library can clone into a cgroup or nothing more: there is no place in it for a filter between clone
// and exec. So this is a fork of our own, the way syscall does it. The three hooks stop signals and the scheduler
// around a fork; their names are kept stable for such use.

//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

//go:linkname afterForkInChild syscall.runtime_AfterForkInChild
func afterForkInChild()

// cloneArgs is the kernel's struct clone_args, up to the cgroup.
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// plan is everything the child needs, in memory before the fork: afterwards nothing may be allocated.
type plan struct {
	path       *byte
	argv, envv []*byte
	files      []uintptr
	terminal   bool
	dir        int // -1: none
	credential *syscall.Credential
	groups     *uint32
	groupCount int
	openFiles  unix.Rlimit
	filter     unix.SockFprog
	report     int // the pipe an error goes to
	clone      cloneArgs
	pidfd      int32 // where the kernel puts it

	// For Inside.
	inside       bool
	capabilities struct {
		header unix.CapUserHeader
		none   [2]unix.CapUserData
	}
	news news
}

const usualOpenFiles = 1024

// newPlan prepares a fork. The caller reads the report from pipe and closes it; p.report is closed after the fork.
func (s *Spawner) newPlan(spec *Spec, program []unix.SockFilter) (p *plan, pipe int, err error) {
	p = &plan{dir: -1, credential: spec.Credential}
	if p.path, err = unix.BytePtrFromString(spec.Path); err != nil {
		return nil, 0, err
	}
	if p.argv, err = pointers(spec.Args); err != nil {
		return nil, 0, err
	}
	if p.envv, err = pointers(spec.Env); err != nil {
		return nil, 0, err
	}
	p.files, p.terminal = s.files(spec), spec.Terminal
	if spec.Dir != nil {
		p.dir = int(spec.Dir.Fd())
	}
	if c := spec.Credential; c != nil && len(c.Groups) > 0 {
		p.groups, p.groupCount = &c.Groups[0], len(c.Groups)
	}
	// The runtime has raised its own limit to the highest allowed; programs that count with the usual one break with
	// millions. They may raise it themselves.
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &p.openFiles); err != nil {
		return nil, 0, err
	}
	p.openFiles.Cur = min(p.openFiles.Cur, usualOpenFiles)
	if len(program) > 0 {
		p.filter = unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	}
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		return nil, 0, err
	}
	p.report = ends[1]
	return p, ends[0], nil
}

// cloneExec starts a process in the cgroup, with the filter.
func (s *Spawner) cloneExec(spec *Spec) (pid, pidfd int, err error) {
	p, pipe, err := s.newPlan(spec, s.confinement.Filter)
	if err != nil {
		return 0, -1, err
	}
	defer unix.Close(pipe)
	// CLONE_VFORK without CLONE_VM: this thread waits until the child has executed its program, which saves both from
	// copying pages that only one of them needs.
	p.clone = cloneArgs{
		flags: unix.CLONE_INTO_CGROUP | unix.CLONE_VFORK | unix.CLONE_PIDFD, exitSignal: uint64(unix.SIGCHLD),
		cgroup: uint64(s.confinement.CgroupFD),
	}
	syscall.ForkLock.Lock()
	child, errno := forkChild(p)
	syscall.ForkLock.Unlock()
	_ = unix.Close(p.report)
	runtime.KeepAlive(spec)
	runtime.KeepAlive(p)
	if errno != 0 {
		return 0, -1, errno
	}
	// Nothing in the pipe: the program runs and close-on-exec has closed it.
	var failed syscall.Errno
	buf := (*[unsafe.Sizeof(failed)]byte)(unsafe.Pointer(&failed))
	for {
		n, err := unix.Read(pipe, buf[:])
		if err == unix.EINTR {
			continue
		}
		if n == 0 {
			return child, int(p.pidfd), nil
		}
		if err == nil && n != len(buf) {
			err = unix.EPIPE
		}
		_ = unix.Close(int(p.pidfd))
		var status syscall.WaitStatus
		_, _ = wait4(child, &status, 0, nil)
		if err != nil {
			return 0, -1, err
		}
		return 0, -1, failed
	}
}

func pointers(list []string) ([]*byte, error) {
	out := make([]*byte, len(list)+1)
	for i, s := range list {
		p, err := unix.BytePtrFromString(s)
		if err != nil {
			return nil, err
		}
		out[i] = p
	}
	return out, nil
}

// forkChild returns in the parent only. In the child there is one thread, no scheduler and a copy of a heap that
// somebody may have been in the middle of: raw system calls, nothing else.
//
//go:noinline
//go:norace
//go:nocheckptr
func forkChild(p *plan) (int, syscall.Errno) {
	beforeFork()
	p.clone.pidfd = uint64(uintptr(unsafe.Pointer(&p.pidfd))) // not earlier: a stack may move
	pid, _, errno := syscall.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&p.clone)), unsafe.Sizeof(p.clone), 0)
	if errno != 0 || pid != 0 {
		afterFork()
		return int(pid), errno
	}
	errno = becomeProgram(p)
	_, _, _ = syscall.RawSyscall(unix.SYS_WRITE, uintptr(p.report), uintptr(unsafe.Pointer(&errno)), unsafe.Sizeof(errno))
	for {
		_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, 253, 0, 0)
	}
}

// becomeProgram is what the child does. Not even its stack may grow, hence nosplit.
//
//go:nosplit
//go:norace
//go:nocheckptr
func becomeProgram(p *plan) syscall.Errno {
	if _, _, errno := syscall.RawSyscall(unix.SYS_SETSID, 0, 0, 0); errno != 0 {
		return errno
	}
	afterForkInChild()
	if _, _, errno := syscall.RawSyscall6(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&p.openFiles)), 0, 0, 0); errno != 0 {
		return errno
	}
	if c := p.credential; c != nil {
		if !c.NoSetGroups {
			if _, _, errno := syscall.RawSyscall(unix.SYS_SETGROUPS, uintptr(p.groupCount), uintptr(unsafe.Pointer(p.groups)), 0); errno != 0 {
				return errno
			}
		}
		if _, _, errno := syscall.RawSyscall(unix.SYS_SETGID, uintptr(c.Gid), 0, 0); errno != 0 {
			return errno
		}
		if _, _, errno := syscall.RawSyscall(unix.SYS_SETUID, uintptr(c.Uid), 0, 0); errno != 0 {
			return errno
		}
	}
	if p.inside {
		if _, _, errno := syscall.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
			return errno
		}
		if _, _, errno := syscall.RawSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&p.capabilities.header)), uintptr(unsafe.Pointer(&p.capabilities.none[0])), 0); errno != 0 {
			return errno
		}
	}
	if p.dir >= 0 {
		if _, _, errno := syscall.RawSyscall(unix.SYS_FCHDIR, uintptr(p.dir), 0, 0); errno != 0 {
			return errno
		}
	}
	// Out of the way first: a source may itself be one of the targets.
	for i := range p.files {
		fd, _, errno := syscall.RawSyscall(unix.SYS_FCNTL, p.files[i], unix.F_DUPFD_CLOEXEC, 64)
		if errno != 0 {
			return errno
		}
		p.files[i] = fd
	}
	for i := range p.files {
		if _, _, errno := syscall.RawSyscall(unix.SYS_DUP3, p.files[i], uintptr(i), 0); errno != 0 {
			return errno
		}
	}
	if p.terminal {
		if _, _, errno := syscall.RawSyscall(unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 0); errno != 0 {
			return errno
		}
	}
	// Last, so that it may refuse all of the above.
	if p.filter.Len > 0 {
		if _, _, errno := syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&p.filter))); errno != 0 {
			return errno
		}
	}
	_, _, errno := syscall.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(p.path)), uintptr(unsafe.Pointer(&p.argv[0])), uintptr(unsafe.Pointer(&p.envv[0])))
	return errno
}
