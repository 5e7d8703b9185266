// SPDX-License-Identifier: Apache-2.0

package spawn

import (
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a started program. It leads a session and a process group of its own; both have its pid.
type Process struct {
	Pid     int
	Started time.Time

	done chan struct{}
	mark uint64 // see nextMark

	// mu keeps a signal and the reaping apart: once reaped, the pid may belong to somebody else.
	mu     sync.Mutex
	reaped bool
	lost   bool
	status syscall.WaitStatus
	usage  syscall.Rusage
}

// Done is closed when the process has ended and is reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Status says how it ended; only after Done. ok is false when the end could not be collected.
func (p *Process) Status() (status syscall.WaitStatus, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status, p.reaped && !p.lost
}

// Usage is what the process used, together with those of its descendants that were waited for; only after Done.
//
// The kernel's peak of memory has a floor: a process is born as a copy of the daemon, and the size of that counts.
func (p *Process) Usage() (cpu time.Duration, peakMemory int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Duration(p.usage.Utime.Nano() + p.usage.Stime.Nano()), int64(p.usage.Maxrss) << 10
}

// Signal sends a signal to the process alone.
func (p *Process) Signal(sig syscall.Signal) error { return p.kill(p.Pid, sig) }

// SignalGroup sends a signal to its process group. After the leader's end it does nothing: see Tree for those
// that are left.
func (p *Process) SignalGroup(sig syscall.Signal) error { return p.kill(-p.Pid, sig) }

func (p *Process) kill(target int, sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return os.ErrProcessDone
	}
	err := unix.Kill(target, sig)
	if err == unix.ESRCH {
		return os.ErrProcessDone
	}
	return err
}
