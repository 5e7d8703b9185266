// SPDX-License-Identifier: Apache-2.0

package spawn

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Apart makes a program the first process of namespaces of its own: mount, pid, ipc, uts. It has every right in them and
// none outside. It carries the daemon's filter, not the one for children, because that refuses what it has to do: it must
// be a program of ours, which gives up its rights before anybody else's program is in there.
type Apart struct {
	Users   *os.File // the user namespace they belong to; nil: a new one and nothing else, without ids and rights, see MapUsers
	Network bool     // a network namespace too
}

// Inside puts a program into the namespaces of a process that was started Apart, as a child of the daemon all the same.
// It has no capabilities, not even in there.
type Inside struct {
	Namespaces []*os.File        // the user namespace first: it gives the right to the others
	Filter     []unix.SockFilter // the program's filter; nil: none
}

const apartNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS

// MapUsers gives each id of the daemon's user namespace to that of a process, as itself.
//
// The kernel lets the process's owner do so only while the process is dumpable, which also means that every program of
// its user can trace it. So the process must be one that has neither rights nor memory worth having; a user namespace is
// taken from it and those who get rights in it are never dumpable.
func MapUsers(pid int) error {
	dir := "/proc/" + strconv.Itoa(pid) + "/"
	for _, kind := range []string{"uid_map", "gid_map"} {
		ids, err := identityMap("/proc/self/" + kind)
		if err != nil {
			return err
		}
		if err := os.WriteFile(dir+kind, ids, 0); err != nil {
			return err
		}
	}
	return nil
}

// identityMap is a map of this user namespace, for one below.
func identityMap(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var ids []byte
	for line := range bytes.Lines(text) {
		fields := bytes.Fields(line) // the first id inside, the first outside, how many
		if len(fields) != 3 {
			return nil, fmt.Errorf("%s: %q", path, line)
		}
		ids = fmt.Appendf(ids, "%s %s %s\n", fields[0], fields[0], fields[2])
	}
	return ids, nil
}

// forkElsewhere starts what the dedicated thread cannot, because of the filter it carries. The thread for it exists only
// so long: it enters the cgroup and is never used again.
func (s *Spawner) forkElsewhere(spec *Spec) answer {
	reply := make(chan answer)
	go func() {
		// Never unlocked, so that it ends with this goroutine. Not the main thread, which would not.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			reply <- s.forkElsewhere(spec)
			return
		}
		a := answer{pidfd: -1}
		if s.confinement.EnterThread != nil {
			a.err = s.confinement.EnterThread()
		}
		switch {
		case a.err != nil:
		case spec.Inside != nil:
			a.pid, a.err = s.forkInside(spec)
		case spec.Apart.Users != nil:
			a.pid, a.err = s.forkApart(spec)
		default:
			a.pid, a.err = s.forkWithUsers(spec)
		}
		if a.err == nil {
			// Nobody reaps it before Start has returned.
			if fd, err := unix.PidfdOpen(a.pid, 0); err == nil {
				a.pidfd = fd
			}
		}
		reply <- a
	}()
	return <-reply
}

// forkWithUsers starts a program in a user namespace in which nobody has a number. With its exec it loses all rights.
func (s *Spawner) forkWithUsers(spec *Spec) (int, error) {
	attr := &syscall.ProcAttr{Env: spec.Env, Files: s.files(spec), Sys: &syscall.SysProcAttr{Setsid: true, Cloneflags: unix.CLONE_NEWUSER}}
	if s.confinement.CgroupFD > 0 {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, s.confinement.CgroupFD
	}
	pid, err := syscall.ForkExec(spec.Path, spec.Args, attr)
	runtime.KeepAlive(spec)
	return pid, err
}

func (s *Spawner) forkApart(spec *Spec) (int, error) {
	how := passage{make: apartNamespaces}
	how.add(spec.Apart.Users)
	if spec.Apart.Network {
		how.make |= unix.CLONE_NEWNET
	}
	p, pipe, err := s.newPlan(spec, nil)
	if err != nil {
		return 0, err
	}
	return s.pass(spec, p, pipe, how)
}

func (s *Spawner) forkInside(spec *Spec) (int, error) {
	if spec.Credential == nil || spec.Dir == nil {
		return 0, errors.New("spawn: a program inside needs a user and a directory of its own")
	}
	if len(spec.Inside.Namespaces) > len(passage{}.through) {
		return 0, errors.New("spawn: too many namespaces")
	}
	var how passage
	for _, namespace := range spec.Inside.Namespaces {
		how.add(namespace)
	}
	p, pipe, err := s.newPlan(spec, spec.Inside.Filter)
	if err != nil {
		return 0, err
	}
	p.inside = true
	p.capabilities.header.Version = unix.LINUX_CAPABILITY_VERSION_3
	return s.pass(spec, p, pipe, how)
}

// passage is a way into other namespaces: those behind a descriptor, and new ones.
type passage struct {
	through [8]uintptr
	count   int
	make    uintptr
}

func (p *passage) add(namespace *os.File) {
	p.through[p.count] = namespace.Fd()
	p.count++
}

// news is what the two processes on the way write into the report pipe.
type news struct {
	pid   int32
	errno int32
}

// pass starts a program in other namespaces. It needs two forks: a process cannot move to another pid namespace, only its
// children are born there. The first child goes and makes the second with CLONE_PARENT, so that it is ours to wait for.
func (s *Spawner) pass(spec *Spec, p *plan, pipe int, how passage) (int, error) {
	defer unix.Close(pipe)
	p.clone = cloneArgs{flags: unix.CLONE_VFORK, exitSignal: uint64(unix.SIGCHLD)}
	if s.confinement.CgroupFD > 0 {
		p.clone.flags |= unix.CLONE_INTO_CGROUP
		p.clone.cgroup = uint64(s.confinement.CgroupFD)
	}
	syscall.ForkLock.Lock()
	between, errno := forkTwice(p, &how)
	syscall.ForkLock.Unlock()
	_ = unix.Close(p.report)
	runtime.KeepAlive(spec)
	runtime.KeepAlive(p)
	if errno != 0 {
		return 0, errno
	}
	var status syscall.WaitStatus
	_, _ = wait4(between, &status, 0, nil)
	pid, failed := 0, syscall.Errno(0)
	for {
		var n news
		count, err := unix.Read(pipe, (*[unsafe.Sizeof(n)]byte)(unsafe.Pointer(&n))[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil || count != int(unsafe.Sizeof(n)) {
			break // both have closed it: one has left, the other executed its program
		}
		if n.pid != 0 {
			pid = int(n.pid)
		} else {
			failed = syscall.Errno(n.errno)
		}
	}
	if failed == 0 && pid == 0 {
		failed = unix.EPIPE
	}
	if failed != 0 {
		if pid != 0 {
			_, _ = wait4(pid, &status, 0, nil)
		}
		return 0, failed
	}
	return pid, nil
}

// forkTwice returns in the parent only; see forkChild.
//
//go:noinline
//go:norace
//go:nocheckptr
func forkTwice(p *plan, how *passage) (int, syscall.Errno) {
	beforeFork()
	pid, _, errno := syscall.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&p.clone)), unsafe.Sizeof(p.clone), 0)
	if errno != 0 || pid != 0 {
		afterFork()
		return int(pid), errno
	}
	for i := 0; i < how.count && errno == 0; i++ {
		_, _, errno = syscall.RawSyscall(unix.SYS_SETNS, how.through[i], 0, 0)
	}
	if errno == 0 && how.make != 0 {
		_, _, errno = syscall.RawSyscall(unix.SYS_UNSHARE, how.make, 0, 0)
	}
	if errno == 0 {
		// Its exit signal is that of this process.
		pid, _, errno = syscall.RawSyscall6(unix.SYS_CLONE, unix.CLONE_PARENT, 0, 0, 0, 0, 0)
		if errno == 0 && pid == 0 {
			errno = becomeProgram(p)
		}
	}
	p.news = news{pid: int32(pid), errno: int32(errno)}
	_, _, _ = syscall.RawSyscall(unix.SYS_WRITE, uintptr(p.report), uintptr(unsafe.Pointer(&p.news)), unsafe.Sizeof(p.news))
	for {
		_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, 253, 0, 0)
	}
}
