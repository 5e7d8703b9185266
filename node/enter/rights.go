// SPDX-License-Identifier: Apache-2.0

package enter

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/seccomp"
)

// Kept are the capabilities of a sandbox's root, all of them towards its own user namespace only: enough to own
// files, change user, signal its processes and listen anywhere.
var Kept = []struct {
	Bit  uint
	Name string
}{
	{unix.CAP_CHOWN, "CAP_CHOWN"},
	{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE"},
	{unix.CAP_FOWNER, "CAP_FOWNER"},
	{unix.CAP_FSETID, "CAP_FSETID"},
	{unix.CAP_KILL, "CAP_KILL"},
	{unix.CAP_SETGID, "CAP_SETGID"},
	{unix.CAP_SETUID, "CAP_SETUID"},
	{unix.CAP_NET_BIND_SERVICE, "CAP_NET_BIND_SERVICE"},
}

// keptCapabilities are the same as the kernel takes them.
func keptCapabilities() [2]unix.CapUserData {
	var mask uint32
	for _, c := range Kept {
		mask |= 1 << c.Bit
	}
	return [2]unix.CapUserData{{Effective: mask, Permitted: mask}}
}

// giveUpRights leaves every thread of this process, and all that it will ever start, with what execd needs. isolates:
// that it can make user namespaces in which its own root user exists, for which the kernel asks for CAP_SETFCAP (a file
// with capabilities made in there would be one out here). Commands do not get it: their thread gives it up.
func giveUpRights(isolates bool) error {
	// A crash inside must not write a core file through a handler of the host.
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fail("core limit", err)
	}
	// Capabilities belong to a thread, so all of them do it. The bounding set stays full: with no-new-privileges an
	// exec cannot add what is not in the permitted set, and 33 more calls on every thread would cost milliseconds.
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := keptCapabilities()
	if isolates {
		data[0].Effective |= 1 << unix.CAP_SETFCAP
		data[0].Permitted |= 1 << unix.CAP_SETFCAP
	}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0)
	if errno != 0 {
		return fail("capabilities", errno)
	}
	// Loading the filter for all threads also gives all of them this thread's no-new-privileges.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fail("no new privileges", err)
	}
	if err := seccomp.Load(seccomp.Base, true); err != nil {
		return fail("seccomp", err)
	}
	// Memory, open files and environment of execd are nobody's business, also not of the sandbox's root.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fail("dumpable", err)
	}
	return nil
}
