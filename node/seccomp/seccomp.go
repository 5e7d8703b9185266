// SPDX-License-Identifier: Apache-2.0

// Package seccomp limits which system calls threads of a sandbox may make.
//
// The programs are compiled when code is generated (see package policy for the table and its reasons) and
// loading one costs some 70 µs. Filters are per thread, inherited by fork and exec, and stack: every
// loaded one must allow a call. So:
//
//   - execd loads Base on all its threads, once its root is built;
//   - the entry point and commands carry the sandbox's profile on top, with no further exec: on cgroup v1
//     the locked thread that forks them loads it once; on v2 each child loads Program between clone3 and
//     exec, because the profile refuses clone3 and nothing else reaches a v2 group;
//   - what builds an isolated session (package isolated) needs Base, which it replaces by Strict before any program of
//     the session runs; those programs carry Strict whatever the sandbox's profile is.
//
// A refused call fails with EPERM; clone3 and calls this build does not know with ENOSYS, for which
// libraries have a fall-back. A call through a foreign ABI (32-bit on amd64) kills the process.
//
// ptrace and process_vm_readv are allowed in every profile: gdb, strace and profilers are what a sandbox is
// for, since Linux 4.8 a tracer cannot bypass the filter, and the kernel's own check (same user, no more
// capabilities, dumpable) keeps them off execd, which is not dumpable. pidfd_getfd is refused.
package seccomp

//go:generate go run ./policy/generate numbers
//go:generate go run ./policy/generate

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Profile names a filter.
type Profile int

const (
	// Base is for execd's own threads. It contains every other profile, since those are stacked on it.
	Base Profile = iota
	// Strict is the default for what users run: no namespaces, mounts, keys, BPF, io_uring, modules, …
	Strict
	// Nested also allows user namespaces of one's own and what is done in them: isolated runs,
	// Chromium's sandbox, bubblewrap.
	Nested
)

func (p Profile) String() string {
	switch p {
	case Base:
		return "base"
	case Strict:
		return "strict"
	case Nested:
		return "nested"
	}
	return fmt.Sprintf("Profile(%d)", int(p))
}

// Program is the profile's filter, for a caller that loads it itself. Nobody may write to it.
func Program(p Profile) ([]unix.SockFilter, error) {
	switch p {
	case Strict:
		return strictProgram[:], nil
	case Base, Nested:
		return nestedProgram[:], nil
	}
	return nil, fmt.Errorf("seccomp: no such profile: %v", p)
}

// Load puts the filter on the calling thread, for good; with allThreads on every thread of the process.
// The caller has set no_new_privs and, without allThreads, locked its thread.
func Load(p Profile, allThreads bool) error {
	code, err := Program(p)
	if err != nil {
		return err
	}
	program := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	flags := uintptr(0)
	if allThreads {
		flags = unix.SECCOMP_FILTER_FLAG_TSYNC
	}
	stuck, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(code)
	if errno != 0 {
		return fmt.Errorf("load the %v filter: %w", p, errno)
	}
	// TSYNC reports a thread with a filter of its own instead of an errno.
	if stuck != 0 {
		return fmt.Errorf("load the %v filter: thread %d has another one", p, stuck)
	}
	return nil
}
