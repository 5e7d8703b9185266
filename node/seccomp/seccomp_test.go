// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The test binary is also the program that runs under a filter: SECCOMP_TEST names the profile, its
// arguments say what to do.
func TestMain(m *testing.M) {
	if name, ok := os.LookupEnv("SECCOMP_TEST"); ok {
		if err := confined(name, os.Args[1:]); err != nil {
			fmt.Println("error", err)
			os.Exit(99)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func confined(name string, args []string) error {
	profiles := map[string]Profile{"base": Base, "strict": Strict, "nested": Nested}
	if p, ok := profiles[name]; ok { // "none" runs the same without, to see what the kernel says by itself
		runtime.LockOSThread()
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return err
		}
		// As in a sandbox: base on all threads, the profile on the forking one.
		if err := Load(Base, true); err != nil {
			return err
		}
		if err := Load(p, false); err != nil {
			return err
		}
	}
	switch args[0] {
	case "probe":
		for _, p := range probes {
			fmt.Println(p.name, p.try())
		}
		return nil
	case "filters":
		return filters()
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	os.Unsetenv("SECCOMP_TEST")
	return syscall.Exec(path, args, os.Environ())
}

type probe struct {
	name string
	try  func() syscall.Errno
	// what strict and nested say; 0 stands for "whatever the kernel says by itself"
	strict, nested syscall.Errno
}

func raw(nr uintptr, args ...uintptr) func() syscall.Errno {
	var a [6]uintptr
	copy(a[:], args)
	return func() syscall.Errno {
		_, _, errno := unix.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
		return errno
	}
}

// socket closes what it opens.
func socket(family, typ, proto uintptr) func() syscall.Errno {
	return func() syscall.Errno {
		fd, _, errno := unix.RawSyscall(unix.SYS_SOCKET, family, typ, proto)
		if errno == 0 {
			unix.Close(int(fd))
		}
		return errno
	}
}

const bad = ^uintptr(0) // no valid pointer, fd or flag anywhere

var probes = func() []probe {
	const no = syscall.EPERM
	everywhere := func(name string, try func() syscall.Errno) probe { return probe{name, try, no, no} }
	unlessNested := func(name string, try func() syscall.Errno) probe { return probe{name, try, no, 0} }
	never := func(name string, try func() syscall.Errno) probe { return probe{name, try, 0, 0} }
	garbage := uintptr(0x100000000)
	return []probe{
		unlessNested("mount", raw(unix.SYS_MOUNT, bad, bad, bad)),
		unlessNested("umount2", raw(unix.SYS_UMOUNT2, bad, 0)),
		unlessNested("pivot_root", raw(unix.SYS_PIVOT_ROOT, bad, bad)),
		unlessNested("chroot", raw(unix.SYS_CHROOT, bad)),
		unlessNested("unshare", raw(unix.SYS_UNSHARE, 0)),
		unlessNested("setns", raw(unix.SYS_SETNS, bad, 0)),
		everywhere("fsopen", raw(unix.SYS_FSOPEN, bad, 0)),
		everywhere("open_tree", raw(unix.SYS_OPEN_TREE, bad, bad, bad)),
		everywhere("mount_setattr", raw(unix.SYS_MOUNT_SETATTR, bad, bad, bad)),
		everywhere("bpf", raw(unix.SYS_BPF, 9999, bad, 0)),
		everywhere("perf_event_open", raw(unix.SYS_PERF_EVENT_OPEN, bad, 0, 0, bad, 0)),
		everywhere("keyctl", raw(unix.SYS_KEYCTL, 9999)),
		everywhere("add_key", raw(unix.SYS_ADD_KEY, bad, bad, bad, 1)),
		everywhere("request_key", raw(unix.SYS_REQUEST_KEY, bad, bad, bad, 0)),
		everywhere("userfaultfd", raw(unix.SYS_USERFAULTFD, 1<<20)),
		everywhere("kexec_load", raw(unix.SYS_KEXEC_LOAD, 0, 1<<20, bad, 0x8000)),
		everywhere("kexec_file_load", raw(unix.SYS_KEXEC_FILE_LOAD, bad, bad, 0, 0, 0x8000)),
		everywhere("init_module", raw(unix.SYS_INIT_MODULE, bad, 0, bad)),
		everywhere("finit_module", raw(unix.SYS_FINIT_MODULE, bad, bad, 0)),
		everywhere("delete_module", raw(unix.SYS_DELETE_MODULE, bad, 0)),
		everywhere("io_uring_setup", raw(unix.SYS_IO_URING_SETUP, 1, bad)),
		everywhere("io_uring_enter", raw(unix.SYS_IO_URING_ENTER, bad, 0, 0, 0, 0, 0)),
		everywhere("io_uring_register", raw(unix.SYS_IO_URING_REGISTER, bad, 0, 0, 0)),
		everywhere("open_by_handle_at", raw(unix.SYS_OPEN_BY_HANDLE_AT, bad, bad, 0)),
		everywhere("pidfd_getfd", raw(unix.SYS_PIDFD_GETFD, bad, 0, 0)),
		everywhere("swapon", raw(unix.SYS_SWAPON, bad, 0)),
		everywhere("reboot", raw(unix.SYS_REBOOT, 0, 0, 0)), // wrong magic: harmless wherever this runs
		everywhere("AF_VSOCK", socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0)),
		everywhere("AF_VSOCK behind garbage", socket(garbage|unix.AF_VSOCK, unix.SOCK_STREAM, 0)),
		everywhere("AF_PACKET", socket(unix.AF_PACKET, unix.SOCK_RAW, 0)),
		everywhere("AF_ALG", socket(unix.AF_ALG, unix.SOCK_SEQPACKET, 0)),
		everywhere("netlink audit", socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT)),
		everywhere("netlink netfilter behind garbage", socket(unix.AF_NETLINK, unix.SOCK_RAW, garbage|unix.NETLINK_NETFILTER)),
		everywhere("TIOCSTI", raw(unix.SYS_IOCTL, bad, unix.TIOCSTI, bad)),
		everywhere("TIOCSTI behind garbage", raw(unix.SYS_IOCTL, bad, garbage|unix.TIOCSTI, bad)),
		everywhere("F_SETLEASE", raw(unix.SYS_FCNTL, bad, unix.F_SETLEASE, unix.F_WRLCK)),
		everywhere("F_SETLEASE behind garbage", raw(unix.SYS_FCNTL, bad, garbage|unix.F_SETLEASE, unix.F_WRLCK)),
		never("fcntl", raw(unix.SYS_FCNTL, 0, unix.F_GETFL)),
		unlessNested("clone with a user namespace", clone(unix.CLONE_NEWUSER)),
		unlessNested("clone with a network namespace", clone(unix.CLONE_NEWNET)),
		{"clone3", raw(unix.SYS_CLONE3, bad, 64), syscall.ENOSYS, 0},
		never("AF_UNIX", socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)),
		never("AF_INET", socket(unix.AF_INET, unix.SOCK_STREAM, 0)),
		never("AF_INET6", socket(unix.AF_INET6, unix.SOCK_DGRAM, 0)),
		never("netlink route", socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE)),
		never("clone", clone(0)),
		// Not PTRACE_TRACEME: with a tracer who does not look, the next signal would stop this process for ever.
		never("ptrace", raw(unix.SYS_PTRACE, unix.PTRACE_ATTACH, 0x7fffffff)),
		never("process_vm_readv", raw(unix.SYS_PROCESS_VM_READV, bad, bad, 0, bad, 0, 0)),
		never("personality", raw(unix.SYS_PERSONALITY, 0xffffffff)),
		never("ioctl", raw(unix.SYS_IOCTL, bad, unix.TIOCGWINSZ, bad)),
		{"a call of tomorrow", raw(9999), syscall.ENOSYS, syscall.ENOSYS},
		// getpid of x32; on arm64 just another unknown number.
		{"x32", raw(0x40000000 | 39), syscall.ENOSYS, syscall.ENOSYS},
	}
}()

// clone starts and reaps a process that has the flags; /proc/self/exe with an odd profile name ends at once.
func clone(flags uintptr) func() syscall.Errno {
	return func() syscall.Errno {
		p, err := os.StartProcess("/proc/self/exe", []string{"x", "filters"}, &os.ProcAttr{
			Env: []string{"SECCOMP_TEST=child"}, Sys: &syscall.SysProcAttr{Cloneflags: flags},
		})
		var errno syscall.Errno
		if err == nil {
			p.Wait()
		} else if !errors.As(err, &errno) {
			return syscall.EIO
		}
		return errno
	}
}

// filters prints how many filters each thread has.
func filters() error {
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil {
		return err
	}
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "Seccomp_filters:") {
				fmt.Print(line)
			}
		}
	}
	return nil
}

func run(t *testing.T, profile string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), "SECCOMP_TEST="+profile)
	cmd.Dir = t.TempDir()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

func answers(t *testing.T, profile string) map[string]string {
	t.Helper()
	text, err := run(t, profile, "probe")
	if err != nil {
		t.Fatalf("%s: %v\n%s", profile, err, text)
	}
	said := map[string]string{}
	for i, line := range strings.Split(strings.TrimSpace(text), "\n") {
		said[probes[i].name] = strings.TrimPrefix(line, probes[i].name+" ")
	}
	return said
}

func TestProbes(t *testing.T) {
	bare := answers(t, "none")
	for _, profile := range []string{"strict", "nested", "base"} {
		said := answers(t, profile)
		for _, p := range probes {
			want := map[string]syscall.Errno{"strict": p.strict, "nested": p.nested, "base": p.nested}[profile]
			if want == 0 {
				if said[p.name] != bare[p.name] {
					t.Errorf("%s: %s says %q, without filter %q", profile, p.name, said[p.name], bare[p.name])
				}
				continue
			}
			if said[p.name] != want.Error() {
				t.Errorf("%s: %s says %q, want %q", profile, p.name, said[p.name], want.Error())
			}
		}
	}
	// A probe that the kernel refuses anyway proves nothing about the filter.
	for _, p := range probes {
		if p.strict == syscall.EPERM && bare[p.name] == syscall.EPERM.Error() {
			t.Logf("note: %s is EPERM here without a filter too", p.name)
		}
	}
}

// foreign is an amd64 program that asks for its pid through the 32-bit gate, then exits with 0.
var foreign = []byte{
	0xb8, 20, 0, 0, 0, // mov eax, 20 (getpid of i386)
	0xcd, 0x80, // int 0x80
	0x31, 0xff, // xor edi, edi
	0xb8, 60, 0, 0, 0, // mov eax, 60 (exit of amd64)
	0x0f, 0x05, // syscall
}

func TestThe32BitGateKills(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the program is amd64 code")
	}
	path := filepath.Join(t.TempDir(), "foreign")
	if err := os.WriteFile(path, elf(foreign), 0o755); err != nil {
		t.Fatal(err)
	}
	if text, err := run(t, "none", path); err != nil {
		t.Skipf("this kernel has no 32-bit gate: %v %s", err, text)
	}
	_, err := run(t, "strict", path)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGSYS {
		t.Errorf("ended with %v", err)
	}
}

// elf wraps code in the smallest executable the kernel takes: one header, one segment.
func elf(code []byte) []byte {
	const base, start = 0x400000, 64 + 56
	var b bytes.Buffer
	put := func(v any) { binary.Write(&b, binary.LittleEndian, v) }
	b.Write([]byte{0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	put([]uint16{2, 62})
	put(uint32(1))
	put([]uint64{base + start, 64, 0})
	put(uint32(0))
	put([]uint16{64, 56, 1, 0, 0, 0})
	put([]uint32{1, 5})
	put([]uint64{0, base, base, uint64(start + len(code)), uint64(start + len(code)), 4096})
	b.Write(code)
	return b.Bytes()
}

func TestLoadReachesTheThreadsItShould(t *testing.T) {
	text, err := run(t, "strict", "filters")
	if err != nil {
		t.Fatal(err, text)
	}
	two := 0
	for line := range strings.Lines(text) {
		switch strings.TrimSpace(strings.TrimPrefix(line, "Seccomp_filters:")) {
		case "2":
			two++
		case "1":
		default:
			t.Errorf("a thread has %q", line)
		}
	}
	if two != 1 || strings.Count(text, "\n") < 2 {
		t.Errorf("want two filters on exactly one thread of several:\n%s", text)
	}
}

func TestProfilesAndPrograms(t *testing.T) {
	if _, err := Program(Profile(42)); err == nil {
		t.Error("there is a profile 42")
	}
	if unsafe.Sizeof(unix.SockFilter{}) != 8 {
		t.Error("struct sock_filter has eight bytes")
	}
}

// Real programs, as far as this machine has them.
func TestOrdinaryProgramsRun(t *testing.T) {
	programs := []struct {
		name string
		args []string
		want string
	}{
		{"bash", []string{"bash", "-c", `set -e; echo a b | tr ' ' '\n' | sort -r | paste -sd,; (sleep 0 & wait); ulimit -n >/dev/null; exec 3<>/dev/null`}, "b,a"},
		{"tar", []string{"bash", "-c", "set -e; mkdir d; echo x > d/f; ln d/f d/g; mkfifo d/p; tar cf t.tar d; rm -r d; tar xpf t.tar; cat d/g"}, "x"},
		{"python3", []string{"python3", "-c", `
import asyncio, concurrent.futures, multiprocessing, os, socket, ssl, subprocess, sqlite3, tempfile, threading, time, ctypes
t = threading.Thread(target=time.sleep, args=(0,)); t.start(); t.join()
assert subprocess.run(["sh", "-c", "exit 7"]).returncode == 7
async def main():
    p = await asyncio.create_subprocess_exec("true"); await p.wait()
    s = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    r, w = await asyncio.open_connection(*s.sockets[0].getsockname()); await r.read(); s.close()
asyncio.run(main())
with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as p: assert p.submit(abs, -3).result() == 3
with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as p: assert p.submit(abs, -4).result() == 4
socket.getaddrinfo("localhost", 80); socket.if_nameindex()
db = sqlite3.connect("x.db"); db.execute("create table t(a)"); db.commit()
os.memfd_create("m"); os.sched_setaffinity(0, os.sched_getaffinity(0)); os.posix_spawn("/bin/true", ["true"], {}); os.wait()
print("fine")`}, "fine"},
		{"gcc", []string{"bash", "-c", `set -e; printf '#include <stdio.h>\n#include <pthread.h>\nvoid *f(void *a){puts("thread");return 0;}int main(){pthread_t t;if(pthread_create(&t,0,f,0))return 1;pthread_join(t,0);return 0;}' > a.c; gcc a.c -o a -lpthread; ./a`}, "thread"},
		{"node", []string{"node", "-e", `const {Worker}=require("worker_threads");require("fs").promises.readFile("/etc/hostname").catch(()=>0).then(()=>new Worker("require('child_process').execSync('true');console.log('fine')",{eval:true}))`}, "fine"},
		{"git", []string{"bash", "-c", "set -e; export HOME=$PWD; git init -q r; cd r; echo x > f; git add f; git -c user.name=a -c user.email=a@b commit -qm m; git clone -q . ../s; git -C ../s log --format=%s"}, "m"},
		{"strace", []string{"strace", "-o", "/dev/null", "true"}, ""},
		{"gdb", []string{"gdb", "-q", "-batch", "-ex", "run", "-ex", "quit", "/bin/true"}, "exited normally"},
	}
	for _, p := range programs {
		for _, profile := range []string{"strict", "nested"} {
			t.Run(p.name+" "+profile, func(t *testing.T) {
				if _, err := exec.LookPath(p.name); err != nil {
					t.Skipf("%s is not installed here", p.name)
				}
				text, err := run(t, profile, p.args...)
				if err != nil || !strings.Contains(text, p.want) {
					t.Errorf("%v\n%s", err, text)
				}
			})
		}
	}
}

func TestNamespacesWorkInNestedOnly(t *testing.T) {
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		t.Skip("unshare is not installed here")
	}
	if text, err := run(t, "none", unshare, "-Urm", "true"); err != nil {
		t.Skipf("this machine gives no user namespaces: %s", text)
	}
	if text, err := run(t, "nested", unshare, "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"); err != nil {
		t.Errorf("nested: %v\n%s", err, text)
	}
	if text, err := run(t, "strict", unshare, "-Urm", "true"); err == nil || !strings.Contains(text, "Operation not permitted") {
		t.Errorf("strict: %v\n%s", err, text)
	}
}
