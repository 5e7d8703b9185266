// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"bufio"
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
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/thread"
)

// The test binary plays the sandbox's processes too: argv[1] names the part.
var parts = map[string]func(){
	"wait": func() { fmt.Println("ready"); io.Copy(io.Discard, os.Stdin) },
	"where": func() {
		cat("/proc/self/cgroup")
		ns, _ := os.Readlink("/proc/self/ns/cgroup")
		fmt.Println("ns " + ns)
	},
	"bomb":   bomb,
	"spin":   func() { fmt.Println("ready"); spin() },
	"breed":  breed,
	"nested": nested,
}

const partPrefix = "cgroup-test-part-"

func TestMain(m *testing.M) {
	HoldNamespace()
	if part, ok := parts[strings.TrimPrefix(os.Args[0], partPrefix)]; ok {
		part()
		os.Exit(0)
	}
	if os.Geteuid() != 0 {
		fmt.Println("SKIP: node/cgroup tests make real control groups and need root")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func cat(path string) {
	text, _ := os.ReadFile(path)
	os.Stdout.Write(text)
}

// bomb touches memory until it is killed; 512 MiB is far above every limit used here.
func bomb() {
	var keep [][]byte
	for range 128 {
		b := make([]byte, 4<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		keep = append(keep, b)
	}
	runtime.KeepAlive(keep)
	fmt.Println("survived")
}

func spin() {
	for {
		runtime.Gosched()
	}
}

// breed starts waiting children until the kernel says no, and reports how many and why.
func breed() {
	n := 0
	var err error
	for ; n < 300 && err == nil; n++ {
		_, err = os.StartProcess("/proc/self/exe", []string{partPrefix + "wait"}, &os.ProcAttr{
			Files: []*os.File{os.Stdin, nil, nil},
		})
	}
	fmt.Printf("bred %d %v\n", n, errors.Is(err, syscall.EAGAIN))
}

// nested plays execd: it starts a command in the payload leaf through the inherited entry and prints
// where the command, this thread and the rest of this process are.
func nested() {
	version := os.Getenv("CGROUP_VERSION")
	count, _ := strconv.Atoi(os.Getenv("ENTRY_FILES"))
	var files []*os.File
	for i := range count {
		files = append(files, os.NewFile(uintptr(3+i), "entry"))
	}
	entry := EntryFromFiles(version, files)
	_, err := thread.Run(func() (none struct{}, back bool, err error) {
		if err := entry.EnterThread(); err != nil {
			return none, false, err
		}
		cmd := exec.Command("/proc/self/exe")
		cmd.Args = []string{partPrefix + "where"}
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if fd := entry.CgroupFD(); fd >= 0 {
			cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
		}
		return none, false, cmd.Run()
	})
	if err != nil {
		fmt.Println("error", err)
	}
	fmt.Println("main")
	cat(fmt.Sprintf("/proc/self/task/%d/cgroup", os.Getpid()))
}

// hosts are the detected one and, on hybrid machines, the v2 mount without controllers: enough to test
// placement, freezing and killing the v2 way.
func hosts(t *testing.T) map[string]*Host {
	t.Helper()
	h, err := Detect()
	if err != nil {
		t.Fatal(err)
	}
	if h.Version() == None {
		t.Fatal("no usable control groups, although root")
	}
	found := map[string]*Host{h.Version(): h}
	if h.Version() == V1 {
		lines, _ := readLines("/proc/self/mountinfo")
		own, _ := readLines("/proc/thread-self/cgroup")
		if y := detectV2(parseMounts(lines), parseMembership(own)); y != nil {
			y.controllers = nil
			found["v2 bare"] = &Host{version: V2, hiers: []hierarchy{*y}}
		}
	}
	return found
}

func eachHost(t *testing.T, f func(t *testing.T, h *Host)) {
	for name, h := range hosts(t) {
		t.Run(name, func(t *testing.T) { f(t, h) })
	}
}

func detected(t *testing.T) *Host {
	t.Helper()
	h, err := Detect()
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func tree(t *testing.T, h *Host) string {
	t.Helper()
	name := fmt.Sprintf("opensandbox-test-%d-%d", os.Getpid(), time.Now().UnixNano())
	t.Cleanup(func() {
		if err := errors.Join(Sweep(h, name, nil), h.Leave(name)); err != nil {
			t.Errorf("clean up: %v", err)
		}
		for _, y := range h.hiers {
			if _, err := os.Stat(filepath.Join(y.base, name)); !missing(err) {
				t.Errorf("%s is left behind", filepath.Join(y.base, name))
			}
		}
	})
	return name
}

func create(t *testing.T, h *Host, tree, slot string, l Limits) *Group {
	t.Helper()
	g, err := h.Create(tree, slot, l)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

type child struct {
	*os.Process
	in  *os.File
	out *bufio.Reader
}

// spawn starts a part of this binary as the slot's init, or, with payload, straight in the payload leaf.
func spawn(t *testing.T, g *Group, part string, payload bool, env []string, files ...*os.File) *child {
	t.Helper()
	inR, inW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	start := func(attr *syscall.SysProcAttr) (*os.Process, error) {
		return os.StartProcess("/proc/self/exe", []string{partPrefix + part}, &os.ProcAttr{
			Env: env, Files: append([]*os.File{inR, outW, os.Stderr}, files...), Sys: attr,
		})
	}
	var p *os.Process
	if payload {
		p, err = startInPayload(g, start)
	} else {
		err = g.SpawnInit(func(attr *syscall.SysProcAttr) (err error) { p, err = start(attr); return err })
	}
	if err != nil {
		t.Fatal(err)
	}
	inR.Close()
	outW.Close()
	t.Cleanup(func() { p.Kill(); p.Wait(); inW.Close(); outR.Close() })
	return &child{p, inW, bufio.NewReader(outR)}
}

// startInPayload does on the launcher's side what execd does inside; the thread is then thrown away.
func startInPayload(g *Group, start func(*syscall.SysProcAttr) (*os.Process, error)) (*os.Process, error) {
	entry, err := g.PayloadEntry()
	if err != nil {
		return nil, err
	}
	defer entry.Close()
	return thread.Run(func() (*os.Process, bool, error) {
		if err := entry.EnterThread(); err != nil {
			return nil, false, err
		}
		if i, ok := g.host.holding("freezer"); ok { // execd, whom we stand in for, is in it from birth
			if err := write(g.dirs[i], "tasks", "0"); err != nil {
				return nil, false, err
			}
		}
		attr := &syscall.SysProcAttr{}
		if fd := entry.CgroupFD(); fd >= 0 {
			attr.UseCgroupFD, attr.CgroupFD = true, fd
		}
		p, err := start(attr)
		return p, false, err
	})
}

func (c *child) line(t *testing.T) string {
	t.Helper()
	s, err := c.out.ReadString('\n')
	if err != nil {
		t.Fatalf("the child said %q and then: %v", s, err)
	}
	return strings.TrimSpace(s)
}

func (c *child) all(t *testing.T) string {
	t.Helper()
	text, err := io.ReadAll(c.out)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestInitIsBornInItsLeafAndSeesNothingAbove(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		g := create(t, h, tree(t, h), "slot-7", Limits{})
		text := spawn(t, g, "where", false, nil).all(t)
		ours, _ := os.Readlink("/proc/self/ns/cgroup")
		if strings.Contains(text, ours) || !strings.Contains(text, "ns cgroup:[") {
			t.Errorf("the child is in our cgroup namespace: %s", text)
		}
		inside := parseMembership(strings.Split(text, "\n"))
		if h.version == V2 {
			if inside[""] != "/slot-7/execd" {
				t.Errorf("v2 path inside is %q", inside[""])
			}
			return
		}
		for _, c := range []string{"cpu", "memory", "pids"} {
			if inside[c] != "/execd" {
				t.Errorf("%s path inside is %q", c, inside[c])
			}
		}
		if inside["freezer"] != "/" {
			t.Errorf("freezer path inside is %q", inside["freezer"])
		}
	})
}

func TestTheLaunchersThreadsComeBack(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		name := tree(t, h)
		if err := h.Prepare(name); err != nil {
			t.Fatal(err)
		}
		before, _ := os.ReadFile("/proc/self/cgroup")
		ns, _ := os.Readlink("/proc/self/ns/cgroup")
		for i := range 5 {
			spawn(t, create(t, h, name, fmt.Sprint("s", i), Limits{}), "where", false, nil).all(t)
		}
		tasks, _ := filepath.Glob("/proc/self/task/*")
		for _, task := range tasks {
			now, err := os.ReadFile(task + "/cgroup")
			if missing(err) || errors.Is(err, unix.ESRCH) {
				continue
			}
			if string(now) != string(before) {
				t.Errorf("%s stands in %s", task, now)
			}
			if link, err := os.Readlink(task + "/ns/cgroup"); err == nil && link != ns {
				t.Errorf("%s is in namespace %s", task, link)
			}
		}
	})
}

func TestAFailedStartIsReportedAndHarmless(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		g := create(t, h, tree(t, h), "s", Limits{})
		want := errors.New("no such init")
		if err := g.SpawnInit(func(*syscall.SysProcAttr) error { return want }); !errors.Is(err, want) {
			t.Fatal(err)
		}
		if err := g.Remove(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestCommandsOfExecdLandInThePayloadLeaf(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		g := create(t, h, tree(t, h), "s", Limits{})
		entry, err := g.PayloadEntry()
		if err != nil {
			t.Fatal(err)
		}
		defer entry.Close()
		env := []string{"CGROUP_VERSION=" + h.Version(), fmt.Sprint("ENTRY_FILES=", len(entry.Files()))}
		text := spawn(t, g, "nested", false, env, entry.Files()...).all(t)
		command, rest, ok := strings.Cut(text, "main\n")
		if !ok || strings.Contains(text, "error") {
			t.Fatalf("execd said %q", text)
		}
		at, main := parseMembership(strings.Split(command, "\n")), parseMembership(strings.Split(rest, "\n"))
		key, wantCommand, wantMain := "pids", "/payload", "/execd"
		if h.version == V2 {
			key, wantCommand, wantMain = "", "/s/payload", "/s/execd"
		}
		if at[key] != wantCommand || main[key] != wantMain {
			t.Errorf("the command is in %q, execd's main thread in %q", at[key], main[key])
		}
	})
}

func TestDelegatedRootMayCloneIntoPayloadOnly(t *testing.T) {
	for name, h := range hosts(t) {
		if h.version != V2 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			g := create(t, h, tree(t, h), "s", Limits{})
			const uid = 1879048192
			// A sandbox's root: no capability on the host, born in the execd leaf, clones a command.
			tryClone := func() string {
				entry, err := g.PayloadEntry()
				if err != nil {
					t.Fatal(err)
				}
				defer entry.Close()
				out, in, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				err = g.SpawnInit(func(attr *syscall.SysProcAttr) error {
					attr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
					p, err := os.StartProcess("/proc/self/exe", []string{partPrefix + "nested"}, &os.ProcAttr{
						Env:   []string{"CGROUP_VERSION=v2", "ENTRY_FILES=1"},
						Files: []*os.File{nil, in, in, entry.Files()[0]}, Sys: attr,
					})
					if err == nil {
						t.Cleanup(func() { p.Wait() })
					}
					return err
				})
				in.Close()
				if err != nil {
					t.Fatal(err)
				}
				text, _ := io.ReadAll(out)
				return string(text)
			}
			if text := tryClone(); !strings.Contains(text, "permission denied") {
				t.Errorf("before Delegate: %s", text)
			}
			owner := func(file string) int {
				var st unix.Stat_t
				if err := unix.Stat(filepath.Join(g.dirs[0], file), &st); err != nil {
					t.Fatal(err)
				}
				return int(st.Uid)
			}
			if err := g.Delegate(uid); err != nil {
				t.Fatal(err)
			}
			if text := tryClone(); !strings.Contains(text, "0::/s/payload") {
				t.Errorf("after Delegate: %s", text)
			}
			for file, want := range map[string]int{
				"cgroup.procs": uid, "payload/cgroup.procs": uid, "execd/cgroup.procs": 0,
				"payload/cgroup.freeze": 0, ".": 0, "payload": 0,
			} {
				if got := owner(file); got != want {
					t.Errorf("%s belongs to %d, want %d", file, got, want)
				}
			}
		})
	}
}

func TestMemoryLimitKillsThePayload(t *testing.T) {
	h := detected(t)
	g := create(t, h, tree(t, h), "s", Limits{MemoryBytes: 64 << 20})
	m, err := g.Meter()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c := spawn(t, g, "bomb", true, nil)
	if text := c.all(t); text != "" {
		t.Fatalf("the bomb %s", text)
	}
	state, err := c.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if ws := state.Sys().(syscall.WaitStatus); ws.Signal() != syscall.SIGKILL {
		t.Errorf("the bomb ended with %v", state)
	}
	u, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	if u.OOMKills != 1 || u.MemoryLimit != 64<<20 || (u.MemoryPeak != 0 && u.MemoryPeak < 60<<20) {
		t.Errorf("the meter says %+v", u)
	}
}

func TestPidsLimitRefusesForks(t *testing.T) {
	h := detected(t)
	g := create(t, h, tree(t, h), "s", Limits{Pids: 60})
	m, err := g.Meter()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if u, err := m.Read(); err != nil || u.PidsLimit != 60 || u.PidsRefused != 0 {
		t.Errorf("before: %+v, %v", u, err)
	}
	c := spawn(t, g, "breed", true, nil)
	var n int
	var again bool
	if _, err := fmt.Sscanf(c.line(t), "bred %d %t", &n, &again); err != nil || n >= 60 || !again {
		t.Errorf("bred %d, EAGAIN %v, %v", n, again, err)
	}
	// Not 60 exactly: a failed fork gives its place back, and threads of the parent come and go.
	if u, err := m.Read(); err != nil || u.PidsRefused < 1 || u.Pids > 60 || u.Pids < int64(n) {
		t.Errorf("after: %+v, %v", u, err)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
}

func TestCPUQuotaThrottles(t *testing.T) {
	h := detected(t)
	g := create(t, h, tree(t, h), "s", Limits{CPUMillis: 50})
	m, err := g.Meter()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c := spawn(t, g, "spin", true, nil)
	c.line(t)
	i, _ := h.holding("cpu")
	// Counted by the scheduler, so a loaded machine makes this slower but not wrong.
	deadline := time.Now().Add(30 * time.Second)
	for {
		text, err := os.ReadFile(filepath.Join(g.dirs[i], payloadLeaf, "cpu.stat"))
		if err != nil {
			t.Fatal(err)
		}
		if fieldOf(string(text), "nr_throttled") >= 3 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("not throttled in 30 s: %s", text)
		}
		time.Sleep(10 * time.Millisecond)
	}
	u, err := m.Read()
	if err != nil || u.CPULimitMillis != 50 || u.CPU <= 0 {
		t.Errorf("the meter says %+v, %v", u, err)
	}
}

func TestExecdHasLimitsOfItsOwn(t *testing.T) {
	h := detected(t)
	g := create(t, h, tree(t, h), "s", Limits{MemoryBytes: 32 << 20, Pids: 10, CPUMillis: 100})
	file := map[string][2]string{V1: {"memory.limit_in_bytes", "pids.max"}, V2: {"memory.max", "pids.max"}}[h.version]
	for i, c := range []string{"memory", "pids"} {
		k, _ := h.holding(c)
		text, err := os.ReadFile(filepath.Join(g.dirs[k], execdLeaf, file[i]))
		want := []int64{256 << 20, 512}[i]
		if err != nil || number(strings.TrimSpace(string(text))) != want {
			t.Errorf("%s of execd is %s (%v)", file[i], text, err)
		}
	}
}

func TestMeterThroughInheritedFiles(t *testing.T) {
	h := detected(t)
	g := create(t, h, tree(t, h), "s", Limits{CPUMillis: 250, MemoryBytes: 128 << 20, Pids: 40})
	m, err := g.Meter()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c := spawn(t, g, "wait", true, nil)
	c.line(t)
	again := MeterFromFiles(h.Version(), m.Files())
	for range 2 { // twice: the files are read from their start each time
		u, err := again.Read()
		if err != nil {
			t.Fatal(err)
		}
		if u.CPULimitMillis != 250 || u.MemoryLimit != 128<<20 || u.Pids < 1 || u.Memory <= 0 || u.CPU <= 0 || u.OOMKills != 0 {
			t.Errorf("the meter says %+v", u)
		}
	}
	if _, err := MeterFromFiles(None, nil).Read(); !errors.Is(err, ErrNoMeter) {
		t.Errorf("no meter says %v", err)
	}
}

func TestAMeterOfAnOlderKernelReadsAsNothing(t *testing.T) {
	for _, version := range []string{V1, V2} {
		var files []*os.File
		for range meterFiles[version] {
			f, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
		}
		m := MeterFromFiles(version, files)
		defer m.Close()
		if u, err := m.Read(); err != nil || u != (Usage{}) {
			t.Errorf("%s: %+v, %v", version, u, err)
		}
	}
	text := map[string]string{"pids.max": "max", "pids.events": "max 7", "pids.current": "3"}
	for version, u := range map[string]Usage{V1: usageV1(text), V2: usageV2(text)} {
		if u.PidsLimit != 0 || u.PidsRefused != 7 || u.Pids != 3 {
			t.Errorf("%s: %+v", version, u)
		}
	}
}

func TestFreezeThawKillRemove(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		g := create(t, h, tree(t, h), "s", Limits{})
		init := spawn(t, g, "wait", false, nil)
		payload := spawn(t, g, "spin", true, nil)
		init.line(t)
		payload.line(t)
		if err := g.Freeze(); err != nil {
			t.Fatal(err)
		}
		before := ticks(t, payload.Pid)
		// No process of the slot may gain cpu time while it is frozen; the pause only gives it a chance to.
		time.Sleep(30 * time.Millisecond)
		if after := ticks(t, payload.Pid); after != before {
			t.Errorf("ran %d ticks while frozen", after-before)
		}
		if err := g.Thaw(); err != nil {
			t.Fatal(err)
		}
		if err := g.Freeze(); err != nil { // Kill must work on the frozen too
			t.Fatal(err)
		}
		if err := g.Kill(); err != nil {
			t.Fatal(err)
		}
		for _, c := range []*child{init, payload} {
			if state, err := c.Wait(); err != nil || state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Errorf("ended with %v, %v", state, err)
			}
		}
		if err := g.Remove(); err != nil {
			t.Fatal(err)
		}
		for _, dir := range g.dirs {
			if _, err := os.Stat(dir); !missing(err) {
				t.Errorf("%s is left", dir)
			}
		}
		if err := errors.Join(g.Kill(), g.Remove()); err != nil {
			t.Errorf("a second time: %v", err)
		}
	})
}

func ticks(t *testing.T, pid int) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil {
		t.Fatal(err)
	}
	return number(strings.Fields(string(text))[0])
}

func TestRemoveOfABusyGroupGivesUpWithTheReason(t *testing.T) {
	h := detected(t)
	g := create(t, h, tree(t, h), "s", Limits{})
	c := spawn(t, g, "wait", true, nil)
	c.line(t)
	if err := g.remove(time.Now()); err == nil || !strings.Contains(err.Error(), "rmdir") {
		t.Errorf("removed a group with a process in it: %v", err)
	}
}

func TestSweepKeepsWhatIsKept(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		name := tree(t, h)
		var children []*child
		for _, slot := range []string{"kept", "lost"} {
			c := spawn(t, create(t, h, name, slot, Limits{}), "wait", false, nil)
			c.line(t)
			children = append(children, c)
		}
		if err := Sweep(h, name, map[string]bool{"kept": true}); err != nil {
			t.Fatal(err)
		}
		for _, y := range h.hiers {
			slots, _ := os.ReadDir(filepath.Join(y.base, name))
			var left []string
			for _, s := range slots {
				if s.IsDir() && s.Name() != supervisorLeaf {
					left = append(left, s.Name())
				}
			}
			if !slices.Equal(left, []string{"kept"}) {
				t.Errorf("left in %s: %v", y.base, left)
			}
		}
		if err := children[0].Signal(syscall.Signal(0)); err != nil {
			t.Errorf("the kept one is gone: %v", err)
		}
	})
}

func TestASecondLauncherFindsTheTreesNamespace(t *testing.T) {
	for name, h := range hosts(t) {
		if h.version != V2 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			name := tree(t, h)
			c := spawn(t, create(t, h, name, "old", Limits{}), "wait", false, nil)
			c.line(t)
			old, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/cgroup", c.Pid))
			// The same process plays its own successor: fresh Host, nothing remembered.
			y := h.hiers[0]
			y.own = filepath.Join(y.base, name, supervisorLeaf)
			next := &Host{version: V2, hiers: []hierarchy{y}}
			g := create(t, next, name, "new", Limits{})
			text := spawn(t, g, "where", false, nil).all(t)
			if !strings.Contains(text, "/new/execd") || !strings.Contains(text, old) {
				t.Errorf("the new sandbox is in %s, the old one in %s", text, old)
			}
		})
	}
}

func TestOurOwnNamespaceIsNotTakenForTheTrees(t *testing.T) {
	if ns := foreignNamespace(strconv.Itoa(os.Getpid())); ns != nil {
		ns.Close()
		t.Error("a process of our own namespace gave it")
	}
}

func TestASecondLauncherStartsOnTheSlotsOfADeadOne(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		name := tree(t, h)
		old := create(t, h, name, "old", Limits{})
		next := &Host{version: h.version, hiers: slices.Clone(h.hiers)}
		if h.version == V2 {
			next.hiers[0].own = filepath.Join(h.hiers[0].base, name, supervisorLeaf)
		}
		text := spawn(t, create(t, next, name, "new", Limits{}), "where", false, nil).all(t)
		if !strings.Contains(text, "/execd") {
			t.Errorf("the new sandbox is in %s", text)
		}
		if err := old.Remove(); err != nil {
			t.Error(err)
		}
	})
}

func TestCreateRefusesWhatItCannotEnforce(t *testing.T) {
	h := detected(t)
	without := &Host{version: h.version, hiers: slices.Clone(h.hiers)}
	for i := range without.hiers {
		without.hiers[i].controllers = slices.DeleteFunc(slices.Clone(without.hiers[i].controllers),
			func(c string) bool { return c == "memory" })
	}
	_, err := without.Create("opensandbox-test-refused", "s", Limits{MemoryBytes: 1 << 20})
	var missing *MissingController
	if !errors.As(err, &missing) || missing.Controller != "memory" {
		t.Errorf("got %v", err)
	}
}

func TestCreateTwiceIsAnErrorThatLeavesTheFirstAlone(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		name := tree(t, h)
		g := create(t, h, name, "s", Limits{})
		if _, err := h.Create(name, "s", Limits{}); !errors.Is(err, os.ErrExist) {
			t.Errorf("got %v", err)
		}
		for _, dir := range g.dirs {
			if _, err := os.Stat(dir); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestNamesThatAreNoNames(t *testing.T) {
	h := detected(t)
	for _, name := range []string{"", ".", "..", "../x", "a/b", ".hidden", "a\x00b", "supervisor"} {
		if _, err := Open(h, "tree", name); err == nil {
			t.Errorf("slot %q is accepted", name)
		}
		if _, err := Open(h, name, "slot"); err == nil {
			t.Errorf("tree %q is accepted", name)
		}
	}
}

func TestDetectFromTables(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"memory", "cpu,cpuacct", "pids", "unified", "v2", "v2/svc", "v2part"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	controllers := func(d, text string) {
		if err := os.WriteFile(filepath.Join(dir, d, "cgroup.controllers"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	controllers("unified", "hugetlb\n")
	controllers("v2", "cpuset cpu io memory hugetlb pids\n")
	controllers("v2part", "memory pids\n")
	line := func(point, fstype, options string) string {
		return fmt.Sprintf("31 23 0:28 / %s/%s rw,relatime shared:9 - %s cgroup rw,%s", dir, point, fstype, options)
	}
	v1 := []string{line("memory", "cgroup", "memory"), line("cpu,cpuacct", "cgroup", "cpu,cpuacct"), line("pids", "cgroup", "pids")}
	cases := map[string]struct {
		mounts  []string
		version string
		hiers   int
	}{
		"v1":                              {v1, V1, 3},
		"hybrid without limits in v2":     {append(slices.Clone(v1), line("unified", "cgroup2", "nsdelegate")), V1, 3},
		"v2":                              {[]string{line("v2", "cgroup2", "nsdelegate")}, V2, 1},
		"v2 with only a part":             {[]string{line("v2part", "cgroup2", "nsdelegate")}, V2, 1},
		"v1 beats v2 with only a part":    {append(slices.Clone(v1), line("v2part", "cgroup2", "")), V1, 3},
		"nothing":                         {nil, None, 0},
		"v1 with nothing that limits":     {[]string{line("memory", "cgroup", "devices")}, None, 0},
		"a mount point that is not there": {[]string{line("absent", "cgroup", "memory")}, None, 0},
	}
	for name, c := range cases {
		h := detect(parseMounts(c.mounts), map[string]string{"memory": "/svc", "": "/svc"})
		if h.Version() != c.version || len(h.hiers) != c.hiers {
			t.Errorf("%s: %s with %d hierarchies, want %s with %d", name, h.Version(), len(h.hiers), c.version, c.hiers)
		}
	}
	if below("/docker/x", "/docker/x/y") != "y" || below("/docker/x", "/elsewhere") != "/" || below("/", "/a") != "/a" {
		t.Error("paths below a bind of a subtree are wrong")
	}
}

// Output that floods execd must not be a way around the payload's quota.
func TestExecdHasAQuotaOfItsOwn(t *testing.T) {
	for payload, want := range map[int64]int64{50: 500, 1000: 2000, 0: 0} {
		if got := execdLimits(Limits{CPUMillis: payload}).CPUMillis; got != want {
			t.Errorf("payload %dm: execd %dm, want %dm", payload, got, want)
		}
	}
	h := detected(t)
	if h.Version() != V1 {
		return // there the file is cpu.max, written by the function that writes the payload's
	}
	g := create(t, h, tree(t, h), "s", Limits{CPUMillis: 50})
	i, _ := h.holding("cpu")
	text, err := os.ReadFile(filepath.Join(g.dirs[i], execdLeaf, "cpu.cfs_quota_us"))
	if err != nil || strings.TrimSpace(string(text)) != "50000" {
		t.Errorf("%q, %v", text, err)
	}
}

func TestLimitsCanBeChangedBothWays(t *testing.T) {
	h := detected(t)
	g := create(t, h, tree(t, h), "s", Limits{MemoryBytes: 64 << 20, Pids: 10, CPUMillis: 100})
	files := map[string][3]string{
		V1: {"memory.limit_in_bytes", "pids.max", "cpu.cfs_quota_us"}, V2: {"memory.max", "pids.max", "cpu.max"},
	}[h.version]
	for _, l := range []Limits{
		{MemoryBytes: 128 << 20, Pids: 20, CPUMillis: 50},
		{MemoryBytes: 32 << 20, Pids: 5, CPUMillis: 2000},
		{MemoryBytes: 256 << 20, Pids: 5, CPUMillis: 2000},
	} {
		if err := g.Limit(l); err != nil {
			t.Fatal(err)
		}
		for i, want := range []int64{l.MemoryBytes, l.Pids, l.CPUMillis * cpuPeriod / 1000} {
			k, _ := h.holding([]string{"memory", "pids", "cpu"}[i])
			text, err := os.ReadFile(filepath.Join(g.dirs[k], payloadLeaf, files[i]))
			if got, _, _ := strings.Cut(strings.TrimSpace(string(text)), " "); err != nil || number(got) != want {
				t.Errorf("%s is %s, want %d (%v)", files[i], text, want, err)
			}
		}
		if k, _ := h.holding("memory"); h.version == V1 {
			both, err := os.ReadFile(filepath.Join(g.dirs[k], payloadLeaf, "memory.memsw.limit_in_bytes"))
			if err == nil && number(strings.TrimSpace(string(both))) != l.MemoryBytes {
				t.Errorf("memory and swap together are %s, want %d", both, l.MemoryBytes)
			}
		}
	}
}

func TestASlotGivesWayUntilItInsists(t *testing.T) {
	h := detected(t)
	g := create(t, h, tree(t, h), "s", Limits{CPUMillis: 100})
	k, _ := h.holding("cpu")
	file := map[string]string{V1: "cpu.shares", V2: "cpu.weight"}[h.version]
	weight := func() int64 {
		text, err := os.ReadFile(filepath.Join(g.dirs[k], file))
		if err != nil {
			t.Fatal(err)
		}
		return number(strings.TrimSpace(string(text)))
	}
	usual := weight()
	if err := g.Yield(); err != nil || weight() >= usual/5 {
		t.Errorf("weight %d of %d, %v", weight(), usual, err)
	}
	if err := g.Insist(); err != nil || weight() != usual {
		t.Errorf("weight %d, not %d, %v", weight(), usual, err)
	}
}
