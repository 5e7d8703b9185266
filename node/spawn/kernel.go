// SPDX-License-Identifier: Apache-2.0

package spawn

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// siginfo is the part of the kernel's siginfo_t that waitid fills; x/sys leaves the union opaque.
type siginfo struct {
	signo, errno, code int32
	_                  int32
	pid                int32
	_                  [128 - 20]byte
}

// peekEnded gives the pid of a child that has ended, without reaping it; 0 when there is none.
func peekEnded() (int, error) {
	for {
		var info siginfo
		_, _, errno := unix.Syscall6(unix.SYS_WAITID, unix.P_ALL, 0, uintptr(unsafe.Pointer(&info)),
			unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, 0, 0)
		switch errno {
		case 0:
			return int(info.pid), nil
		case unix.EINTR:
			continue
		}
		return 0, errno
	}
}

func prctlGet(option int, into *int32) error {
	_, _, errno := unix.RawSyscall(unix.SYS_PRCTL, uintptr(option), uintptr(unsafe.Pointer(into)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// loadFilter confines the calling thread.
func loadFilter(program []unix.SockFilter) error {
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return errno
	}
	return nil
}

// clone3Allowed asks with arguments that cannot succeed: a kernel or a filter without clone3 says so.
func clone3Allowed() bool {
	_, _, errno := unix.RawSyscall(unix.SYS_CLONE3, 0, 0, 0)
	return errno == unix.EINVAL
}
