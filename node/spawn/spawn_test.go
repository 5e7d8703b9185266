// SPDX-License-Identifier: Apache-2.0

package spawn

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/testleak"
)

func TestMain(m *testing.M) {
	switch os.Getenv("SPAWN_TEST_ROLE") {
	case "subreaper":
		os.Exit(subreaper())
	case "filtered":
		os.Exit(filtered())
	}
	testleak.Main(m)
}

func newSpawner(t *testing.T, c Confinement) *Spawner {
	t.Helper()
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// output runs a program to its end and gives what it wrote.
func output(t *testing.T, s *Spawner, spec Spec) (string, syscall.WaitStatus) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	spec.Stdout, spec.Stderr = w, w
	p, err := s.Start(spec)
	_ = w.Close()
	if err != nil {
		t.Fatalf("start %v: %v", spec.Args, err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	status, ok := p.Status()
	if !ok {
		t.Fatal("the end was lost")
	}
	return string(text), status
}

func sh(script string) Spec { return Spec{Path: "/bin/sh", Args: []string{"sh", "-c", script}} }

func TestChildGetsExactlyWhatItIsGiven(t *testing.T) {
	// Left open by whoever started the daemon: without close-on-exec.
	leak, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leak)
	t.Setenv("SPAWN_SECRET", "secret")
	s := newSpawner(t, Confinement{})
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	spec := sh(`for f in /proc/self/fd/*; do readlink $f; done; env; pwd; echo $$; cut -d' ' -f5,6 /proc/$$/stat; cat`)
	spec.Env, spec.Dir = []string{"A=1"}, dir
	text, status := output(t, s, spec)
	if status != 0 {
		t.Errorf("status %v", status)
	}
	if strings.Contains(text, "passwd") || strings.Contains(text, "SECRET") {
		t.Errorf("something leaked:\n%s", text)
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if !slices.Contains(lines, "A=1") || !slices.Contains(lines, dir.Name()) {
		t.Errorf("environment or directory is missing:\n%s", text)
	}
	pid := lines[len(lines)-2]
	if got, want := lines[len(lines)-1], pid+" "+pid; got != want {
		t.Errorf("group and session are %s, want %s", got, want)
	}
}

func TestUserAndGroups(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("changing the user needs root")
	}
	s := newSpawner(t, Confinement{})
	spec := sh("id -u; id -g; id -G")
	spec.Env = []string{"PATH=/usr/bin:/bin"}
	spec.Credential = &syscall.Credential{Uid: 12345, Gid: 23456, Groups: []uint32{7, 9}}
	if text, _ := output(t, s, spec); text != "12345\n23456\n23456 7 9\n" {
		t.Errorf("got %q", text)
	}
}

func TestStartErrorIsTheKernels(t *testing.T) {
	s := newSpawner(t, Confinement{})
	for path, want := range map[string]error{"/does/not/exist": unix.ENOENT, "/etc/passwd": unix.EACCES} {
		if _, err := s.Start(Spec{Path: path, Args: []string{"x"}}); !errors.Is(err, want) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestEnterThreadRunsOnceOnTheForkingThread(t *testing.T) {
	var entered int
	s := newSpawner(t, Confinement{EnterThread: func() error {
		entered++
		// The thread's own timer slack is inherited by children: a stand-in for a filter that needs no rights.
		_, _, errno := unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_TIMERSLACK, 123457, 0)
		if errno != 0 {
			return errno
		}
		return nil
	}})
	for range 3 {
		text, _ := output(t, s, sh("cat /proc/$$/timerslack_ns"))
		if strings.TrimSpace(text) != "123457" {
			t.Errorf("child was not forked by the entered thread: %q", text)
		}
	}
	if entered != 1 {
		t.Errorf("entered %d times", entered)
	}
	for range 50 { // no other thread has it
		slack := make(chan uintptr)
		go func() {
			runtime.LockOSThread()
			v, _, _ := unix.RawSyscall(unix.SYS_PRCTL, unix.PR_GET_TIMERSLACK, 0, 0)
			slack <- v
		}()
		if <-slack == 123457 {
			t.Fatal("the confinement leaked to another thread")
		}
	}
	failing := errors.New("refused")
	if _, err := New(Confinement{EnterThread: func() error { return failing }}); !errors.Is(err, failing) {
		t.Errorf("a failing confinement gave %v", err)
	}
}

// Ends must be told apart while os/exec runs beside: neither takes the other's.
func TestEndsAreNotMixedUp(t *testing.T) {
	s := newSpawner(t, Confinement{})
	var all sync.WaitGroup
	for i := range 100 {
		all.Add(2)
		go func() {
			defer all.Done()
			p, err := s.Start(sh(fmt.Sprintf("exit %d", i)))
			if err != nil {
				t.Error(err)
				return
			}
			<-p.Done()
			if status, ok := p.Status(); !ok || status.ExitStatus() != i {
				t.Errorf("want %d, got %v %v", i, status, ok)
			}
		}()
		go func() {
			defer all.Done()
			err := exec.Command("/bin/sh", "-c", fmt.Sprintf("exit %d", i)).Run()
			var exit *exec.ExitError
			if i == 0 && err != nil || i > 0 && (!errors.As(err, &exit) || exit.ExitCode() != i) {
				t.Errorf("os/exec: want %d, got %v", i, err)
			}
		}()
	}
	all.Wait()
}

func TestSignalAfterTheEndDoesNothing(t *testing.T) {
	s := newSpawner(t, Confinement{})
	p, err := s.Start(sh("exit 0"))
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if err := p.Signal(unix.SIGKILL); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("got %v", err)
	}
}

// startTree starts a shell with a child that left session and group, and gives the child's pid.
func startTree(t *testing.T, s *Spawner, script string) (*Process, int) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	spec := sh(script)
	spec.Env, spec.Stdout = []string{"PATH=/usr/bin:/bin"}, w
	p, err := s.Start(spec)
	_ = w.Close()
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 32)
	n, err := r.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	if err != nil {
		t.Fatal(err)
	}
	return p, child
}

func gone(pid int) bool {
	s, ok := readStat(pid, nil)
	return !ok || s.dead
}

func TestKillReachesWhoLeftTheGroup(t *testing.T) {
	s := newSpawner(t, Confinement{})
	p, child := startTree(t, s, `setsid sh -c 'trap "" TERM; sleep 100 & echo $$; while :; do wait; done' & wait`)
	tree := NewTree(p.Pid)
	defer tree.Close()
	if n := tree.Scan(); n < 3 {
		t.Errorf("found %d members, want shell, setsid and sleep", n)
	}
	tree.Kill()
	<-p.Done()
	if !tree.WaitGone(time.Now().Add(10 * time.Second)) {
		t.Error("members are left")
	}
	if !gone(child) {
		t.Errorf("%d lives on", child)
	}
}

// A daemon has forked twice and started a session: nothing but its mark connects it with whom it came from.
func TestKillReachesADaemon(t *testing.T) {
	s := newSpawner(t, Confinement{})
	const daemon = `(setsid sh -c 'trap "" TERM; echo $$; exec >&-; sleep 100 & while :; do wait; done' </dev/null &); `
	p, child := startTree(t, s, daemon+"while :; do sleep 1000; done")
	other, bystander := startTree(t, s, daemon+"while :; do sleep 1000; done")
	for {
		// Its parent ends on its own time.
		if now, ok := readStat(child, nil); !ok || now.parent != p.Pid && now.session == child {
			break
		}
		time.Sleep(time.Millisecond)
	}
	blind := NewTree(p.Pid)
	defer blind.Close()
	blind.Scan()
	if _, found := blind.members[child]; found {
		t.Fatal("it is no daemon: the test shows nothing")
	}
	tree := p.Tree()
	defer tree.Close()
	tree.Kill()
	<-p.Done()
	if !gone(child) {
		t.Errorf("%d lives on", child)
	}
	if gone(bystander) {
		t.Errorf("%d of another process is dead", bystander)
	}
	rest := other.Tree()
	defer rest.Close()
	rest.Kill()
	<-other.Done()
	if !gone(bystander) {
		t.Errorf("%d lives on", bystander)
	}
}

// Marks of other users' processes are read in another way.
func TestMarkOfAnotherUser(t *testing.T) {
	s := newSpawner(t, Confinement{})
	p, _ := startTree(t, s, "echo $$; exec sleep 1000")
	if got := markOf(p.Pid); got != p.mark || p.mark == 0 {
		t.Errorf("mark %d, want %d", got, p.mark)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", p.Pid))
	if got := writtenMark(text); err != nil || got != p.mark {
		t.Errorf("written mark %d, want %d (%v)", got, p.mark, err)
	}
	if got := writtenMark([]byte("Max realtime timeout unlimited unlimited us\n")); got != 0 {
		t.Errorf("unlimited is %d", got)
	}
	_ = p.Signal(unix.SIGKILL)
	<-p.Done()
}

func TestUsageCountsWhoWasWaitedFor(t *testing.T) {
	s := newSpawner(t, Confinement{})
	p, err := s.Start(sh(`(i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done); :`))
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if cpu, peak := p.Usage(); cpu < time.Millisecond || peak < 1<<16 {
		t.Errorf("%v, %d bytes", cpu, peak)
	}
}

func TestKillOutrunsAForkBomb(t *testing.T) {
	s := newSpawner(t, Confinement{})
	// Bounded, so that a failing test does not take the machine along: each forks twice, one of the two leaves.
	bomb := filepath.Join(t.TempDir(), "bomb")
	script := `[ $1 -gt 0 ] || exit; sh "$0" $(($1-1)) & setsid sh "$0" $(($1-1)); exec sleep 60`
	if err := os.WriteFile(bomb, []byte(script), 0o644); err != nil {
		t.Fatal(err)
	}
	p, _ := startTree(t, s, `echo $$; sh `+bomb+` 6 & wait`)
	tree := NewTree(p.Pid)
	defer tree.Close()
	tree.Kill()
	<-p.Done()
	if !tree.WaitGone(time.Now().Add(10 * time.Second)) {
		t.Error("members are left")
	}
	for pid, st := range processes() {
		if st.session == p.Pid && !st.dead {
			t.Errorf("%d of the session is left", pid)
		}
	}
}

func TestStatWithAHostileName(t *testing.T) {
	line := []byte("42 (a) R 1 1 1 (b) S 7 8 9 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 0 0\n")
	s, ok := parseStat(line)
	if !ok || s.parent != 7 || s.group != 8 || s.session != 9 || s.start != 12345 {
		t.Errorf("got %+v %v", s, ok)
	}
	for _, bad := range []string{"", "1 (x", "1 (x) S 1 2", "1 (x) S a b c d e f g h i j k l m n o p q r s t"} {
		if _, ok := parseStat([]byte(bad)); ok {
			t.Errorf("%q passed", bad)
		}
	}
}

// As a subreaper (like pid 1) orphans arrive; they are reaped and no end of ours is lost. In a process of its own,
// because the attribute is for good.
func TestOrphansAreReaped(t *testing.T) {
	cmd := exec.Command("/proc/self/exe", "-test.run=^$")
	cmd.Env = append(os.Environ(), "SPAWN_TEST_ROLE=subreaper")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func subreaper() int {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Println(err)
		return 1
	}
	s, err := New(Confinement{})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	var all sync.WaitGroup
	failed := make(chan string, 1000)
	for i := range 100 {
		all.Add(1)
		go func() {
			defer all.Done()
			p, err := s.Start(sh(fmt.Sprintf("(sh -c 'exit 9' & exit 8) & exit %d", i%50)))
			if err != nil {
				failed <- err.Error()
				return
			}
			<-p.Done()
			if status, ok := p.Status(); !ok || status.ExitStatus() != i%50 {
				failed <- fmt.Sprint("wrong end: ", status, ok, i%50)
			}
		}()
	}
	all.Wait()
	// The last orphans may still be on their way out.
	deadline := time.Now().Add(5 * time.Second)
	for {
		pid, err := peekEnded()
		if err == unix.ECHILD {
			break
		}
		if time.Now().After(deadline) {
			fmt.Println("children are left:", pid, err)
			return 1
		}
		time.Sleep(time.Millisecond) // the reaper is another goroutine and tells nobody about orphans
	}
	s.Close()
	close(failed)
	for f := range failed {
		fmt.Println(f)
		return 1
	}
	return 0
}

// deny makes a filter that refuses one system call with EPERM and clone3 with ENOSYS.
func deny(nr uint32) []unix.SockFilter {
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: nr, Jt: 2},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_CLONE3, Jt: 2},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
	}
}

func TestFilterAndCgroupTogether(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("making a cgroup needs root")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^$")
	cmd.Env = append(os.Environ(), "SPAWN_TEST_ROLE=filtered")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == 77 {
		t.Skip("needs a cgroup v2 mount and a build without cgo: " + out.String())
	}
	if err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// filtered runs in a process of its own: no_new_privs cannot be taken back.
func filtered() int {
	root := cgroup2Mount()
	if root == "" {
		return 77
	}
	if err := setNoNewPrivs(); err != nil {
		fmt.Println(err)
		return 77
	}
	group := filepath.Join(root, "spawn-test-"+strconv.Itoa(os.Getpid()))
	if err := os.Mkdir(group, 0o755); err != nil {
		fmt.Println(err)
		return 77
	}
	defer func() {
		// The last member may be a zombie of which the kernel still counts a little.
		for range 200 {
			if os.Remove(group) == nil {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	dir, err := os.Open(group)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer dir.Close()
	fail := func(args ...any) int { fmt.Println(args...); return 1 }
	program := deny(unix.SYS_SYMLINKAT)
	if _, err := New(Confinement{CgroupFD: int(dir.Fd()), EnterThread: func() error { return loadFilter(program) }}); !errors.Is(err, errNoClone3) {
		return fail("a filter on the thread should have been refused:", err)
	}
	// With the group each child gets the filter, without it the thread does; both must look the same from inside.
	for _, c := range []Confinement{{Filter: program}, {Filter: program, CgroupFD: int(dir.Fd())}} {
		s, err := New(c)
		if err != nil {
			return fail(err)
		}
		tmp, err := os.MkdirTemp("", "")
		if err != nil {
			return fail(err)
		}
		defer os.RemoveAll(tmp)
		where, err := os.Open(tmp)
		if err != nil {
			return fail(err)
		}
		defer where.Close()
		r, w, _ := os.Pipe()
		spec := sh(`ln -s x y 2>&1; grep Seccomp: /proc/$$/status; cat /proc/$$/cgroup; pwd; id -u; env | grep A=; n=0; for f in /proc/$$/fd/*; do [ -e $f ] && n=$((n+1)); done; echo fds=$n; trap - TERM; kill -TERM $$`)
		spec.Env, spec.Dir, spec.Stdout, spec.Stderr = []string{"PATH=/usr/bin:/bin", "A=1"}, where, w, w
		spec.Credential = &syscall.Credential{Uid: 12345, Gid: 12345}
		if err := os.Chmod(tmp, 0o777); err != nil {
			return fail(err)
		}
		p, err := s.Start(spec)
		w.Close()
		if err != nil {
			return fail("start:", err)
		}
		data, _ := io.ReadAll(r)
		r.Close()
		<-p.Done()
		text := string(data)
		status, ok := p.Status()
		for _, want := range []string{"Operation not permitted", "Seccomp:\t2", tmp, "12345", "A=1", "fds=3\n"} {
			if !strings.Contains(text, want) {
				return fail("missing", want, "in", text)
			}
		}
		if inside := strings.Contains(text, filepath.Base(group)); inside != (c.CgroupFD > 0) {
			return fail("in the group:", inside, text)
		}
		if !ok || !status.Signaled() || status.Signal() != unix.SIGTERM {
			return fail("end:", status, ok)
		}
		if _, err := s.Start(Spec{Path: "/does/not/exist", Args: []string{"x"}}); !errors.Is(err, unix.ENOENT) {
			return fail("missing program:", err)
		}
		s.Close()
	}
	return 0
}

func cgroup2Mount() string {
	data, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, " - cgroup2 ") {
			return strings.Fields(line)[4]
		}
	}
	return ""
}

// setNoNewPrivs sets it on this thread and, by AllThreadsSyscall where there is no cgo, on all.
func setNoNewPrivs() error {
	runtime.LockOSThread()
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0)
	if errno != 0 { // ENOTSUP: a build with cgo cannot
		return errno
	}
	return nil
}

func BenchmarkStartTrue(b *testing.B) {
	s, err := New(Confinement{})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	for b.Loop() {
		p, err := s.Start(Spec{Path: "/bin/true", Args: []string{"true"}})
		if err != nil {
			b.Fatal(err)
		}
		<-p.Done()
	}
}
