// SPDX-License-Identifier: Apache-2.0

// Package thread runs functions on OS threads of their own, so that they may change what belongs to a thread and not
// to the process: namespaces, ids, capabilities, the control group on cgroup v1, the priority.
package thread

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// Run runs f on a locked thread that is not the process's first one, with the caller's priority. f says whether it put
// everything back; if not, the thread is thrown away with its goroutine. The first thread cannot be thrown away (Go
// parks it for ever), and parked in a foreign control group it would keep that group busy.
//
//	ns, err := thread.Run(func() (*os.File, bool, error) { … })
func Run[T any](f func() (value T, clean bool, err error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	priority := nice()
	var run func()
	run = func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// While this goroutine waits it occupies the first thread, so the next gets another.
			inner := make(chan struct{})
			go func() { run(); close(inner) }()
			<-inner
			runtime.UnlockOSThread()
			return
		}
		own := nice()
		if priority != own {
			setNice(priority)
		}
		value, clean, err := f()
		if priority != own {
			clean = setNice(own) == nil && clean
		}
		done <- result{value, err}
		if clean {
			runtime.UnlockOSThread()
		}
	}
	go run()
	r := <-done
	return r.value, r.err
}

// background is the nice value of work that nobody waits for: a tenth of the processor where others want it. Not the
// lowest there is: it holds locks of the kernel at times, and must get on.
const background = 10

// Background gives the calling goroutine a thread of low priority, for good. What it runs with Run has it too.
// Without the right to raise a priority again it does nothing: then threads could not be used for anything else later.
func Background() {
	runtime.LockOSThread()
	own := nice()
	if setNice(own+1) != nil || setNice(own) != nil {
		runtime.UnlockOSThread()
		return
	}
	setNice(own + background)
}

// normal is the priority that the process was started with. Asked for later, it could be Background's: that may have
// been given the first thread.
var normal = nice()

// Normally runs f with the priority that the process was started with, whatever the calling thread's is: what f starts
// inherits it. The caller has locked the thread.
func Normally(f func()) {
	own := nice()
	if normal != own && setNice(normal) == nil {
		defer setNice(own)
	}
	f()
}

// nice is that of the calling thread.
func nice() int {
	raw, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return 0
	}
	return 20 - raw // the kernel's own way to say it without negative numbers
}

func setNice(n int) error { return unix.Setpriority(unix.PRIO_PROCESS, 0, n) }
