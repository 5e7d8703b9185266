// SPDX-License-Identifier: Apache-2.0

package execd

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/spawn"
)

// TestAsPidOne runs bombs where they belong: in a pid namespace in which execd is pid 1, and in a cgroup with small
// limits. The test binary starts itself there and comes back to this test.
func TestAsPidOne(t *testing.T) {
	if os.Getpid() == 1 {
		t.Run("memory bomb", memoryBombEndsTheCommandOnly)
		t.Run("fork bomb", forkBombEndsTheCommandOnly)
		t.Run("full sandbox", fullSandboxRecovers)
		t.Run("at the limit of processes", answersAtTheLimitOfProcesses)
		t.Run("at the limit of memory", answersAtTheLimitOfMemory)
		t.Run("orphans", orphansAreReaped)
		return
	}
	if os.Getuid() != 0 {
		t.Skip("namespaces and cgroups need root")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestAsPidOne$", "-test.v", "-test.timeout=120s")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

// ownProc gives pid 1 a /proc of its namespace.
func ownProc() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("proc", "/proc", "proc", 0, "")
}

// A thousand orphans, whose parents are gone before they are, leave no zombie, and no end of a command is mixed up with
// one of theirs.
func orphansAreReaped(t *testing.T) {
	s := open(t, "sleep", "1000")
	for range 4 {
		_, body := s.do("POST", "/command", `{"command":"for i in $(seq 250); do (exit 1 & exit 2) & [ $((i % 25)) = 0 ] && wait; done; wait; exit 3"}`)
		if !strings.Contains(body, `"exit_code":3`) {
			t.Errorf("an end was mixed up: %s", body)
		}
	}
	for deadline := time.Now().Add(10 * time.Second); ; {
		left := zombies(t)
		if left == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("zombies: %v", left)
		}
		time.Sleep(time.Millisecond) // they are reaped by another goroutine, which tells nobody
	}
}

func zombies(t *testing.T) (left []string) {
	t.Helper()
	found, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range found {
		text, err := os.ReadFile(name)
		if err == nil && strings.HasPrefix(string(text[bytes.LastIndexByte(text, ')')+1:]), " Z") {
			left = append(left, string(text))
		}
	}
	return left
}

// confined gives the confinement and the meter of a fresh group with small limits.
func confined(t *testing.T) (option, *cgroup.Meter) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("making cgroups needs root")
	}
	host, err := cgroup.Detect()
	if err != nil || host.Version() == "none" {
		t.Skipf("no cgroups here: %v", err)
	}
	var b [4]byte
	_, _ = rand.Read(b[:])
	tree := "opensandbox-" + hex.EncodeToString(b[:])
	group, err := host.Create(tree, "bomb", cgroup.Limits{CPUMillis: 1000, MemoryBytes: 64 << 20, Pids: 100})
	if err != nil {
		t.Skipf("cgroups cannot be made here: %v", err)
	}
	t.Cleanup(func() {
		_ = group.Kill()
		if err := errors.Join(group.Remove(), host.Leave(tree)); err != nil {
			t.Errorf("cgroup is left: %v", err)
		}
	})
	entry, err := group.PayloadEntry()
	if err != nil {
		t.Fatal(err)
	}
	meter, err := group.Meter()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { entry.Close(); meter.Close() })
	return func(c *Config) {
		c.Confinement = spawn.Confinement{EnterThread: entry.EnterThread, CgroupFD: entry.CgroupFD()}
		c.Meter = meter
	}, meter
}

// answers fails when execd is slow to answer.
func (s *sandbox) answers() {
	s.t.Helper()
	start := time.Now()
	if res, _ := s.do("GET", "/ping", ""); res.StatusCode != 200 {
		s.t.Errorf("ping: %d", res.StatusCode)
	}
	if took := time.Since(start); took > 2*time.Second {
		s.t.Errorf("ping took %v", took)
	}
}

func memoryBombEndsTheCommandOnly(t *testing.T) {
	limits, _ := confined(t)
	s := openWith(t, limits, "sleep", "1000")
	for _, script := range []string{"exec tail /dev/zero", "tail /dev/zero; exit $?"} {
		_, body := s.do("POST", "/command", `{"command":"`+script+`","timeout":60000}`)
		if !strings.Contains(body, `"reason":"out_of_memory"`) {
			t.Errorf("%s: %s", script, body)
		}
		s.answers()
	}
	if _, body := s.do("POST", "/command", `{"command":"echo alive"}`); !strings.Contains(body, "alive") {
		t.Errorf("afterwards: %s", body)
	}
	if _, body := s.do("GET", "/metrics", ""); !strings.Contains(body, `"mem_total_mib":64,`) || !strings.Contains(body, `"cpu_count":1,`) {
		t.Errorf("metrics %s", body)
	}
}

// recovers fails unless a command can be run before the time is up.
func (s *sandbox) recovers(within time.Duration) {
	s.t.Helper()
	s.answers()
	for deadline := time.Now().Add(within); ; {
		_, body := s.do("POST", "/command", `{"command":"echo alive"}`)
		if strings.Contains(body, `"alive"`) {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("the sandbox does not recover: %s", body)
		}
	}
}

func forkBombEndsTheCommandOnly(t *testing.T) {
	for name, body := range map[string]string{
		"stays with its command": `{"command":"b() { b | b & wait; }; b","timeout":1500}`,
		"leaves its command":     `{"command":"b() { b | b & }; b"}`,
	} {
		t.Run(name, func(t *testing.T) {
			limits, _ := confined(t)
			s := openWith(t, limits, "sleep", "1000")
			_, out := s.do("POST", "/command", body)
			if !strings.Contains(out, `"reason":"timed_out"`) && !strings.Contains(out, `"reason":"exited"`) {
				t.Errorf("%s: …%s", body, out[max(0, len(out)-400):])
			}
			s.recovers(20 * time.Second)
		})
	}
}

// A command that has left the sandbox full of processes cannot be interrupted any more; the next one makes room.
func fullSandboxRecovers(t *testing.T) {
	limits, meter := confined(t)
	s := openWith(t, limits, "sleep", "1000")
	// bash waits for seconds where it cannot fork, and holds all it has.
	_, out := s.do("POST", "/command", `{"argv":["bash","-c","(while :; do sleep 1000 & done) & exit 0"]}`)
	id := regexp.MustCompile(`[0-9a-f]{32}`).FindString(out)
	for {
		if u, err := meter.Read(); err != nil || u.Pids >= 100 {
			break
		}
		time.Sleep(time.Millisecond) // the kernel counts, and tells nobody
	}
	s.recovers(0)
	if _, body := s.do("GET", "/command/status/"+id, ""); !strings.Contains(body, "filled the sandbox with processes and was killed") {
		t.Errorf("the record says nothing: %s", body)
	}
}

// While a running command holds every process that the sandbox may have, everything that needs no new one works, and
// what needs one says so.
func answersAtTheLimitOfProcesses(t *testing.T) {
	limits, meter := confined(t)
	s := openWith(t, limits, "sleep", "1000")
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, out := s.do("POST", "/command", `{"command":"while :; do sleep 1000 & done","background":true}`)
	id := regexp.MustCompile(`[0-9a-f]{32}`).FindString(out)
	for {
		if u, err := meter.Read(); err != nil || u.Pids >= u.PidsLimit {
			break
		}
		time.Sleep(time.Millisecond) // the kernel counts, and tells nobody
	}
	s.answers()
	if _, body := s.do("GET", "/metrics", ""); !strings.Contains(body, `"pids":100,"pids_limit":100`) {
		t.Errorf("metrics: %s", body)
	}
	if _, body := s.do("GET", "/files/download?path="+name, ""); body != "content" {
		t.Errorf("a file: %s", body)
	}
	if res, body := s.do("PUT", "/files/content?path="+name, "changed"); res.StatusCode != 200 {
		t.Errorf("writing: %s", body)
	}
	made := func(path string) string {
		_, body := s.do("POST", path, `{}`)
		return regexp.MustCompile(`[0-9a-f]{32}`).FindString(body)
	}
	for _, c := range [][3]string{
		{"/command", `{"command":"true"}`, `"reason":"start_failed"`},
		{"/command", `{"argv":["true"]}`, `"reason":"start_failed"`},
		{"/session/" + made("/session") + "/run", `{"command":"true"}`, `"code":"RESOURCE_EXHAUSTED"`},
	} {
		res, body := s.do("POST", c[0], c[1])
		if res.StatusCode >= 500 || !strings.Contains(body, c[2]) || !strings.Contains(body, "The sandbox is at its limit of processes; end some and try again.") {
			t.Errorf("%s: %d %s", c[0], res.StatusCode, body)
		}
	}
	key := []string{"Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="}
	if res, body := s.do("GET", "/pty/"+made("/pty")+"/ws", "", key...); res.StatusCode != 429 || !strings.Contains(body, `"code":"RESOURCE_EXHAUSTED"`) {
		t.Errorf("a terminal: %d %s", res.StatusCode, body)
	}
	if res, body := s.do("DELETE", "/command?id="+id, ""); res.StatusCode != 200 {
		t.Errorf("interrupting it: %d %s", res.StatusCode, body)
	}
	s.recovers(10 * time.Second)
}

// A sandbox whose memory is used up, by a program that holds it, can still be asked and rid of that program.
func answersAtTheLimitOfMemory(t *testing.T) {
	limits, meter := confined(t)
	s := openWith(t, limits, "sleep", "1000")
	name := filepath.Join(t.TempDir(), "file")
	// Pages of a file that its one process holds in memory: there is nothing to kill and little to drop.
	_, out := s.do("POST", "/command", `{"command":"exec python3 -c 'import mmap,signal\nm = []\nwhile True:\n    m.append(mmap.mmap(-1, 1 << 16))\n    m[-1].write(b\"x\" * (1 << 16))\n    if len(m) == 800: print(1, flush=True); signal.pause()'","background":true}`)
	id := regexp.MustCompile(`[0-9a-f]{32}`).FindString(out)
	for deadline := time.Now().Add(20 * time.Second); ; {
		if u, err := meter.Read(); err != nil || u.Memory > 50<<20 {
			break
		}
		if time.Now().After(deadline) {
			_, body := s.do("GET", "/command/"+id+"/logs", "")
			t.Fatalf("the memory does not fill: %s", body)
		}
		time.Sleep(time.Millisecond)
	}
	s.answers()
	big := strings.Repeat("x", 32<<20)
	if res, body := s.do("PUT", "/files/content?path="+name, big); res.StatusCode != 200 {
		t.Errorf("writing what does not fit: %s", body)
	}
	if _, body := s.do("GET", "/files/download?path="+name, ""); body != big {
		t.Errorf("reading it: %d bytes", len(body))
	}
	if _, body := s.do("GET", "/metrics", ""); !strings.Contains(body, `"mem_peak_mib"`) {
		t.Errorf("metrics: %s", body)
	}
	if res, body := s.do("DELETE", "/command?id="+id, ""); res.StatusCode != 200 {
		t.Errorf("interrupting it: %d %s", res.StatusCode, body)
	}
	s.recovers(10 * time.Second)
}
