// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"opensandbox.io/node/wire"
)

// shells waits until so many shells wait.
func (n *node) shells(count int) {
	n.t.Helper()
	n.shellsUntil(fmt.Sprint(count), func(waiting int) bool { return waiting == count })
}

func (n *node) shellsUntil(want string, enough func(waiting int) bool) {
	n.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		var host wire.Host
		if err := n.call("GET", "/host", nil, &host); err != nil {
			n.t.Fatal(err)
		}
		if enough(*host.Shells) {
			return
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("%d shells wait, want %s\n%s", *host.Shells, want, n.log())
		}
	}
}

func pooled(r wire.Report) bool { _, yes := r.Timings["pooled"]; return yes }

// ofPayload reads a file of a sandbox's payload group, whatever it is called on this host.
func (n *node) ofPayload(pid int, names ...string) string {
	n.t.Helper()
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, tree := range n.cgroups() {
			_, slot, ok := strings.Cut(parts[2], "opensandbox-"+n.instance[:8]+"/")
			if !ok {
				continue
			}
			for _, name := range names {
				value, err := os.ReadFile(filepath.Join(tree, filepath.Dir(slot), "payload", name))
				if err == nil {
					return strings.TrimSpace(string(value))
				}
			}
		}
	}
	n.t.Fatalf("none of %v for process %d:\n%s", names, pid, text)
	return ""
}

func TestAShellBecomesWhatIsAskedFor(t *testing.T) {
	n := newNode(t, "--shells", "2")
	n.shells(2)
	r := request("sh", "-c", "echo up; exec sleep infinity")
	r.Env = map[string]string{"GREETING": "hello"}
	r.Limits = &wire.Limits{CPUMillis: 1500, MemoryBytes: 3 << 30, Pids: 77}
	big := n.create(r)
	r = request()
	r.Limits = &wire.Limits{MemoryBytes: 256 << 20, Pids: 33}
	small := n.create(r)
	if !pooled(big.Report) || !pooled(small.Report) {
		t.Fatalf("not from the pool: %v, %v", big.Timings, small.Timings)
	}
	if out := big.out("echo $GREETING; hostname; df -B1 --output=size /dev/shm | tail -1"); out != fmt.Sprintf("hello\n%s\n%d", big.ID[:12], 3<<29) {
		t.Errorf("output %q", out)
	}
	for _, c := range []struct {
		box   *box
		names []string
		want  string
	}{
		{big, []string{"memory.limit_in_bytes", "memory.max"}, fmt.Sprint(3 << 30)},
		{big, []string{"cpu.cfs_quota_us", "cpu.max"}, "150000"},
		{big, []string{"pids.max"}, "77"},
		{small, []string{"memory.limit_in_bytes", "memory.max"}, fmt.Sprint(256 << 20)},
		{small, []string{"cpu.cfs_quota_us", "cpu.max"}, "100000"},
		{small, []string{"pids.max"}, "33"},
	} {
		if got, _, _ := strings.Cut(n.ofPayload(*c.box.PID, c.names...), " "); got != c.want {
			t.Errorf("%s is %s, want %s", c.names[0], got, c.want)
		}
	}
	if out := small.out("df -B1 --output=size /dev/shm | tail -1"); out != fmt.Sprint(128<<20) {
		t.Errorf("/dev/shm of %s", out)
	}
	// What is no different from a sandbox that was made on the spot: the weight among others.
	if got := n.ofPayload(*big.PID, "../cpu.shares", "../cpu.weight"); got != "1024" && got != "100" {
		t.Errorf("it still gives way to others: %s", got)
	}
	if out := big.out("nice"); out != "0" {
		t.Errorf("its programs are nice: %s", out)
	}
	n.delete(big.ID)
	n.delete(small.ID)
	n.shells(2)
	n.checkClean()
}

func TestAnotherProfileIsMadeOnTheSpot(t *testing.T) {
	n := newNode(t, "--shells", "1")
	n.shells(1)
	r := request()
	r.Profile = wire.LaunchRequestProfileNested
	b := n.create(r)
	if pooled(b.Report) {
		t.Error("a shell of the strict profile was used")
	}
	if out := b.out("unshare -U echo inside"); out != "inside" {
		t.Errorf("output %q", out)
	}
	n.delete(b.ID)
	n.checkClean()
}

func TestADeadShellIsNeverHandedOut(t *testing.T) {
	n := newNode(t, "--shells", "3")
	n.shells(3)
	for _, pid := range n.initPIDs() {
		kill(pid)
	}
	for range 3 {
		b := n.create(request())
		if err := b.ping(); err != nil {
			t.Error(err)
		}
		n.delete(b.ID)
	}
	n.shells(3)
	n.checkClean()
}

func TestKilledWithShellsWaiting(t *testing.T) {
	n := newNode(t, "--shells", "4")
	n.shells(4)
	n.kill()
	waitNoInit(t, n)
	n.flags = []string{"--shells", "0"}
	n.start()
	n.checkClean()
	// And in the middle of making them.
	for i := range 6 {
		n.kill()
		n.flags = []string{"--shells", "6"}
		n.start()
		time.Sleep(time.Duration(i) * 7 * time.Millisecond) // the moment is the point
		n.kill()
		n.flags = []string{"--shells", "0"}
		n.start()
		waitNoInit(t, n)
		n.checkClean()
	}
}

func TestABurstLargerThanThePool(t *testing.T) {
	n := newNode(t, "--shells", "3")
	n.shells(3)
	const count = 20
	reports := make(chan wire.Report, count)
	var group sync.WaitGroup
	for range count {
		group.Go(func() {
			var r wire.Report
			if err := n.call("POST", "/sandboxes", request(), &r); err != nil {
				t.Error(err)
				return
			}
			reports <- r
		})
	}
	group.Wait()
	close(reports)
	fromPool, users := 0, map[any]bool{}
	for r := range reports {
		if pooled(r) {
			fromPool++
		}
		users[r.Isolation["users"]] = true
		group.Go(func() { n.call("DELETE", "/sandboxes/"+r.ID, nil, nil) })
	}
	group.Wait()
	if fromPool < 3 || len(users) != count {
		t.Errorf("%d from the pool, %d different users", fromPool, len(users))
	}
	n.checkClean()
}

func TestNothingAccumulatesOverManySandboxes(t *testing.T) {
	n := newNode(t, "--shells", "4")
	n.shells(4)
	files := func() int {
		entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.pid()))
		return len(entries)
	}
	one := func() { n.delete(n.create(request()).ID) }
	for range 20 {
		one()
	}
	n.shells(4)
	n.checkClean()
	before := files()
	for range 200 {
		one()
	}
	// It grows as fast as this machine asks, and goes back when it has forgotten that. A slow machine asks for no
	// more than there are: then it is at rest when its ten seconds of memory are over.
	begun := time.Now()
	n.shellsUntil("more than 4", func(waiting int) bool {
		return waiting > 4 || time.Since(begun) > 12*time.Second
	})
	n.shells(4)
	n.checkClean()
	// Connections of this test come and go.
	if after := files(); after > before+5 {
		t.Errorf("%d open files, %d before", after, before)
	}
}
