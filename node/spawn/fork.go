// SPDX-License-Identifier: Apache-2.0

package spawn

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Fork is a child that a started process has forked by itself and that counts for itself, as the contexts of a code
// kernel do. Close it.
type Fork struct {
	Pid int

	mark  uint64
	pidfd *os.File
	done  chan struct{}
}

// MarkBelow is a mark for the n-th fork of the process, which sets it by itself (RLIMIT_RTTIME); 0: there are none.
func (p *Process) MarkBelow(n uint32) uint64 {
	if p.mark == 0 || n >= markStep/2 {
		return 0
	}
	return p.mark - uint64(n)
}

// Fork takes hold of a child of the process. The pid comes from inside the sandbox and is not believed: a process that
// is no child of this one is refused.
func (p *Process) Fork(pid int, mark uint64) (*Fork, error) {
	if pid <= 1 || pid == p.Pid {
		return nil, fmt.Errorf("%d is no child of %d", pid, p.Pid)
	}
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	f := &Fork{Pid: pid, mark: mark, pidfd: os.NewFile(uintptr(fd), "pidfd"), done: make(chan struct{})}
	if now, ok := readStat(pid, nil); !ok || now.parent != p.Pid {
		_ = f.pidfd.Close()
		return nil, fmt.Errorf("%d is no child of %d", pid, p.Pid)
	}
	go f.watch()
	return f, nil
}

// watch waits until the process has ended. The runtime's poller does it, so that no thread is held.
func (f *Fork) watch() {
	defer close(f.done)
	if raw, err := f.pidfd.SyscallConn(); err == nil {
		_ = raw.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return n > 0 || err != nil && err != unix.EINTR
		})
	}
}

// Done is closed when it has ended, or is closed.
func (f *Fork) Done() <-chan struct{} { return f.done }

// Signal sends a signal to the process alone.
func (f *Fork) Signal(sig syscall.Signal) error {
	raw, err := f.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	failed := os.ErrProcessDone
	if err := raw.Control(func(fd uintptr) { failed = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return err
	}
	return failed
}

// Tree makes the tree of the process. Close it.
func (f *Fork) Tree() *Tree {
	t := NewTree(f.Pid)
	t.mark = f.mark
	return t
}

// Close lets go of it; it does not end it.
func (f *Fork) Close() {
	_ = f.pidfd.Close()
	<-f.done
}
