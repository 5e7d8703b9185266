// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process is the first process of a sandbox, held by a pidfd so that its pid can never mean somebody else.
type Process struct {
	PID       int
	StartTime uint64

	pidfd *os.File
	child bool
}

// ErrGone says that the process a record names is no longer there.
var ErrGone = errors.New("the process is gone")

func newProcess(pid, pidfd int, child bool) (*Process, error) {
	// Non-blocking makes it known to the runtime's poller: waiting costs no thread.
	if err := unix.SetNonblock(pidfd, true); err != nil {
		unix.Close(pidfd)
		return nil, err
	}
	p := &Process{PID: pid, pidfd: os.NewFile(uintptr(pidfd), "pidfd"), child: child}
	start, err := startTime(pid)
	if err != nil {
		p.pidfd.Close()
		return nil, err
	}
	p.StartTime = start
	return p, nil
}

// FindProcess takes up a process that an earlier sandboxd started.
func FindProcess(pid int, start uint64) (*Process, error) {
	pidfd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, ErrGone
	}
	// The pidfd first, then the comparison: the other way round the pid could change hands in between.
	p, err := newProcess(pid, pidfd, false)
	if err != nil {
		return nil, ErrGone
	}
	if p.StartTime != start {
		p.pidfd.Close()
		return nil, ErrGone
	}
	return p, nil
}

// Kill ends the process, and with it everything in its pid namespace.
func (p *Process) Kill() error {
	var failed error
	err := p.control(func(fd int) { failed = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) })
	if err != nil {
		return err
	}
	if errors.Is(failed, unix.ESRCH) {
		return nil
	}
	return failed
}

// Wait returns when the process and everything in its pid namespace has ended.
func (p *Process) Wait() {
	raw, err := p.pidfd.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool { return exited(int(fd)) })
	}
	if err == nil && p.child {
		unix.Wait4(p.PID, nil, 0, nil)
	}
}

func (p *Process) control(f func(fd int)) error {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) { f(int(fd)) })
}

// Close lets go of the process without ending it.
func (p *Process) Close() { p.pidfd.Close() }

func exited(pidfd int) bool {
	poll := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(poll, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return n > 0
	}
}

// startTime is field 22 of /proc/PID/stat: clock ticks since boot. With the pid and the boot id it names a process.
func startTime(pid int) (uint64, error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	// The second field is a name in parentheses that may itself hold spaces and parentheses.
	_, rest, ok := cutLast(string(text), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat: unknown shape", pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// BootID names this run of the kernel.
func BootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
}
