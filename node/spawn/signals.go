// SPDX-License-Identifier: Apache-2.0

package spawn

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// OutlastSignals keeps what a program of a pid namespace sends to its first process from ending it; from outside there
// is SIGKILL. They are taken and dropped, not ignored: programs would inherit that.
func OutlastSignals() {
	signal.Notify(make(chan os.Signal, 1),
		unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGILL, unix.SIGTRAP, unix.SIGABRT, unix.SIGBUS, unix.SIGFPE, unix.SIGUSR1,
		unix.SIGSEGV, unix.SIGUSR2, unix.SIGALRM, unix.SIGTERM, unix.SIGSTKFLT, unix.SIGXCPU, unix.SIGXFSZ, unix.SIGVTALRM,
		unix.SIGPROF, unix.SIGPOLL, unix.SIGPWR, unix.SIGSYS)
}
