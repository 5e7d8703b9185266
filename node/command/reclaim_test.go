// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

const processLimit = 40

// crowdable is a bench whose commands run in a cgroup with room for processLimit processes.
func crowdable(t *testing.T) (*bench, *cgroup.Meter) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("making cgroups needs root")
	}
	host, err := cgroup.Detect()
	if err != nil || host.Version() == cgroup.None {
		t.Skipf("no cgroups here: %v", err)
	}
	tree := fmt.Sprintf("opensandbox-test-%d-%d", os.Getpid(), time.Now().UnixNano())
	group, err := host.Create(tree, "crowd", cgroup.Limits{Pids: processLimit})
	if err != nil {
		t.Skipf("cgroups cannot be made here: %v", err)
	}
	t.Cleanup(func() {
		if err := errors.Join(group.Kill(), group.Remove(), host.Leave(tree)); err != nil {
			t.Errorf("cgroup is left: %v", err)
		}
	})
	entry, err := group.PayloadEntry()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(entry.Close)
	meter, err := group.Meter()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(meter.Close)
	if u, err := meter.Read(); err != nil || u.PidsLimit != processLimit {
		t.Fatalf("no bomb without a limit: %+v %v", u, err)
	}
	// As in a sandbox, orphans are ours to reap: until then they count.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) })
	s, err := spawn.New(spawn.Confinement{EnterThread: entry.EnterThread, CgroupFD: entry.CgroupFD()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	b := newBench(t, func(c *Config) {
		c.Spawner.Close() // the bench's own, which is not confined
		c.Spawner, c.Meter = s, meter
	})
	// First of all, while there is still somebody to reap what a failed test has left.
	t.Cleanup(func() { _ = group.Kill() })
	return b, meter
}

// sh gives up at the first fork that is refused; bash would wait for half a minute.
func sh(script string) wire.RunCommandRequest {
	return wire.RunCommandRequest{Argv: []string{"sh", "-c", script}, Timeout: ptr(int64(60_000))}
}

func TestForkBombIsNamedAndEnded(t *testing.T) {
	b, _ := crowdable(t)
	for name, c := range map[string]struct {
		request wire.RunCommandRequest
		reason  wire.CommandEndReason
		cleared bool
	}{
		"leaves sleepers":  {sh("while :; do sleep 1000 & done"), "exited", true},
		"leaves and is ok": {sh("(while :; do sleep 1000 & done) 2>/dev/null; exit 0"), "exited", true},
		"runs out of time": {wire.RunCommandRequest{Command: "f() { f | f & wait; }; f", Timeout: ptr(int64(1500))}, "timed_out", false},
	} {
		t.Run(name, func(t *testing.T) {
			b := &bench{T: t, runner: b.runner, url: b.url, client: b.client}
			o := b.run(c.request)
			end := o.end()
			if end.Reason != c.reason || !strings.Contains(end.Message, "its limit of 40 processes") {
				t.Errorf("end %+v", end)
			}
			if c.cleared != strings.Contains(end.Message, leftoverKilled) {
				t.Errorf("end %+v", end)
			}
			if s := b.status(o.id); s.End.Message != end.Message || *s.ExitCode != 0 && !strings.Contains(s.Error, "limit of 40") {
				t.Errorf("status %+v %+v", s, s.End)
			}
			// A pipe and a substitution: more than the one process that happens to fit.
			next := b.run(sh("echo $(echo alive | cat)"))
			if strings.Join(next.stdout, "") != "alive" || next.end().Message != "" {
				t.Errorf("afterwards %q %q %+v", next.stdout, next.stderr, next.end())
			}
		})
	}
}

// A bomb that goes on after its command has ended, the classical one.
func TestForkBombThatOutlivesItsCommand(t *testing.T) {
	b, meter := crowdable(t)
	gate := t.TempDir() + "/gate"
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	o := b.run(wire.RunCommandRequest{Command: "f() { f | f & }; f; read x < " + gate + "; exit 0", Background: true})
	for deadline := time.Now().Add(20 * time.Second); ; {
		u, err := meter.Read()
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("no limit reached: %+v %v", u, err)
		}
		if u.PidsRefused > 0 && full(u) {
			break
		}
		time.Sleep(time.Millisecond) // the kernel counts, and tells nobody
	}
	if err := os.WriteFile(gate, []byte("go\n"), 0); err != nil {
		t.Fatal(err)
	}
	end := b.wait(o.id).End
	if end.Reason != "exited" || !strings.Contains(end.Message, "limit of 40") || !strings.Contains(end.Message, leftoverKilled) {
		t.Errorf("end %+v", end)
	}
	if next := b.run(sh("echo $(echo alive | cat)")); strings.Join(next.stdout, "") != "alive" {
		t.Errorf("afterwards %q %q %+v", next.stdout, next.stderr, next.end())
	}
}

// What a command leaves behind on purpose stays, also when the command has met the limit, as long as there is room.
func TestServersAreNotTakenForABomb(t *testing.T) {
	b, _ := crowdable(t)
	list := t.TempDir() + "/pids"
	o := b.run(sh(`sleep 1000 & echo $!
		(while :; do sleep 1000 & echo $! >> ` + list + `; done) 2>/dev/null
		while read pid; do kill $pid; done < ` + list + `; exit 0`))
	if end := o.end(); !strings.Contains(end.Message, "limit of 40") || strings.Contains(end.Message, "killed") {
		t.Errorf("end %+v", end)
	}
	alive(t, o.stdout[0])
	killSession(t, b, o.id)

	// More than half of all places, and never refused.
	o = b.run(sh("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do sleep 1000 & done; echo $!"))
	defer killSession(t, b, o.id)
	if end := o.end(); end.Message != "" {
		t.Errorf("end %+v", end)
	}
	// One that is refused beside it is told, and the server has nothing to do with it.
	next := b.run(sh("(while :; do sleep 1000 & done) 2>/dev/null; exit 0"))
	defer killSession(t, b, next.id)
	if end := next.end(); !strings.Contains(end.Message, "limit of 40") {
		t.Errorf("end %+v", end)
	}
}

func alive(t *testing.T, pid string) {
	t.Helper()
	n, err := strconv.Atoi(pid)
	if err != nil || n < 2 {
		t.Fatalf("pid %q", pid)
	}
	if err := unix.Kill(n, 0); err != nil {
		t.Errorf("%s: %v", pid, err)
	}
}

func TestFull(t *testing.T) {
	for _, c := range []struct {
		used, limit int64
		want        bool
	}{{64, 64, true}, {57, 64, true}, {56, 64, false}, {13, 16, true}, {12, 16, false}, {1000, 0, false}, {256, 256, true}, {224, 256, false}} {
		if got := full(cgroup.Usage{Pids: c.used, PidsLimit: c.limit}); got != c.want {
			t.Errorf("%d of %d: %v", c.used, c.limit, got)
		}
	}
}
