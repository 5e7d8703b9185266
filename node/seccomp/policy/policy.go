// SPDX-License-Identifier: Apache-2.0

// Package policy says which system calls a sandbox may make, and compiles that into the filters of
// package seccomp. It runs when code is generated and in tests, never in a sandbox.
//
// It is an allow list: what is named nowhere is refused with EPERM, and numbers the table of this
// architecture does not know (newer than us, or of another ABI) with ENOSYS, so that libraries fall
// back to older calls.
package policy

import "strings"

// A Profile is a set of allowed calls; each later one contains the earlier.
type Profile string

// The profiles; package seccomp explains their use.
const (
	Strict Profile = "strict"
	Nested Profile = "nested"
)

// Profiles lists them from the narrowest to the widest.
var Profiles = []Profile{Strict, Nested}

// Verdict is what the filter answers.
type Verdict uint32

// The verdicts as the kernel encodes them (SECCOMP_RET_…).
const (
	Kill   Verdict = 0x80000000
	EPERM  Verdict = 0x00050000 | 1
	ENOSYS Verdict = 0x00050000 | 38
	Allow  Verdict = 0x7fff0000
)

// Test looks at the low 32 bits of one argument. Never at 64: the kernel takes these arguments as int, so
// a program could hide the value behind garbage in the upper half.
type Test struct {
	Arg  int
	Op   Op
	With []uint32
}

// Op is how a test compares.
type Op int

// In: equal to one of the values. NotIn: to none. NoBits: none of the bits of the single value is set.
const (
	In Op = iota
	NotIn
	NoBits
)

// Clause holds if all its tests do.
type Clause []Test

// Rule decides one call by its arguments: allowed if one clause holds, else EPERM.
type Rule []Clause

const (
	afUnix, afInet, afInet6, afNetlink = 1, 2, 10, 16

	// Interface addresses (every resolver asks), socket statistics (ss), device events (libudev).
	netlinkRoute, netlinkSockDiag, netlinkUevent = 0, 4, 15

	// NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. NEWTIME cannot be given to clone.
	cloneNew = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

	tiocsti, tioclinux = 0x5412, 0x541c

	fSetLease = 1024
)

// family keeps to protocols a program needs. AF_VSOCK ignores network namespaces and reaches the
// hypervisor; AF_PACKET, AF_ALG and the rest are attack surface.
var family = Rule{
	{{0, In, []uint32{afUnix, afInet, afInet6}}},
	{{0, In, []uint32{afNetlink}}, {2, In, []uint32{netlinkRoute, netlinkSockDiag, netlinkUevent}}},
}

// rules are the calls that depend on their arguments, in every profile unless widened below.
var rules = map[string]Rule{
	"socket":     family,
	"socketpair": family,
	// Threads and processes, but no namespaces.
	"clone": {{{0, NoBits, []uint32{cloneNew}}}},
	// Linux and 32-bit personalities, asking, and what gdb wants: no address randomisation.
	"personality": {{{0, In, []uint32{0, 0x8, 0x20000, 0x20008, 0x40000, 0xffffffff}}}},
	// Typing into a terminal one shares with somebody else.
	"ioctl": {{{1, NotIn, []uint32{tiocsti, tioclinux}}}},
	// A lease makes whoever opens the file wait, up to 45 seconds: also execd, and other sandboxes where it is shared.
	"fcntl": {{{1, NotIn, []uint32{fSetLease}}}},
}

// widened replaces rules in the nested profile; nil means without condition.
var widened = map[Profile]map[string]Rule{
	Nested: {"clone": nil},
}

// added are the calls a profile allows beyond the one before it.
var added = map[Profile]string{
	Strict: common,
	// A user namespace of one's own: isolated runs, Chromium's and bubblewrap's sandboxes. The newer
	// mount calls stay out: tools fall back, and they are young code.
	Nested: "clone3 unshare setns chroot mount umount2 pivot_root sethostname setdomainname",
}

// answeredENOSYS are refused in a way that makes libraries use the older call: the flags of clone3 are in
// memory, where no filter sees them.
var answeredENOSYS = strings.Fields("clone3")

// common: grouped as in the manual pages.
const common = `
	read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile splice tee vmsplice copy_file_range readahead
	fadvise64 fallocate ftruncate truncate fsync fdatasync sync syncfs sync_file_range

	open openat openat2 creat close close_range dup dup2 dup3 pipe pipe2 flock umask
	stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir getdents getdents64
	chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat
	mkdir mkdirat rmdir link linkat unlink unlinkat rename renameat renameat2 symlink symlinkat mknod mknodat
	getxattr lgetxattr fgetxattr setxattr lsetxattr fsetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr
	getxattrat setxattrat listxattrat removexattrat file_getattr file_setattr
	name_to_handle_at cachestat statmount listmount
	inotify_init inotify_init1 inotify_add_watch inotify_rm_watch

	mmap munmap mprotect mremap madvise brk mlock mlock2 munlock mlockall munlockall mincore msync mseal remap_file_pages
	memfd_create memfd_secret pkey_alloc pkey_free pkey_mprotect map_shadow_stack membarrier get_mempolicy
	shmget shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
	mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr

	fork vfork execve execveat exit exit_group wait4 waitid
	kill tkill tgkill pidfd_open pidfd_send_signal process_mrelease
	rt_sigaction rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo
	sigaltstack signalfd signalfd4 pause restart_syscall
	getpid getppid gettid getpgid getpgrp setpgid getsid setsid
	getuid geteuid getgid getegid setuid setgid setreuid setregid setresuid getresuid setresgid getresgid setfsuid setfsgid
	getgroups setgroups capget capset prctl arch_prctl set_tid_address set_robust_list get_robust_list rseq
	futex futex_waitv futex_wake futex_wait futex_requeue
	seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self lsm_get_self_attr lsm_list_modules

	getpriority setpriority sched_yield sched_getparam sched_setparam sched_getscheduler sched_setscheduler
	sched_get_priority_max sched_get_priority_min sched_rr_get_interval sched_setaffinity sched_getaffinity sched_setattr sched_getattr
	ioprio_get ioprio_set getrlimit setrlimit prlimit64 getrusage times sysinfo uname getcpu getrandom

	nanosleep clock_nanosleep gettimeofday time clock_gettime clock_getres clock_adjtime adjtimex alarm getitimer setitimer
	timer_create timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime timerfd_gettime

	bind listen accept accept4 connect getsockname getpeername getsockopt setsockopt shutdown
	sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg
	poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
	io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents

	ptrace process_vm_readv process_vm_writev
	uretprobe uprobe
`

// Calls maps every call a profile allows to its rule; nil means without condition.
func Calls(p Profile) map[string]Rule {
	allowed := map[string]Rule{}
	for name, rule := range rules {
		allowed[name] = rule
	}
	for _, q := range Profiles {
		for name := range strings.FieldsSeq(added[q]) {
			allowed[name] = nil
		}
		for name, rule := range widened[q] {
			allowed[name] = rule
		}
		if q == p {
			break
		}
	}
	return allowed
}
