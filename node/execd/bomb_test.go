// SPDX-License-Identifier: Apache-2.0

package execd

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
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

func orphansAreReaped(t *testing.T) {
	s := open(t, "sleep", "1000")
	for range 20 {
		_, body := s.do("POST", "/command", `{"command":"for i in 1 2 3 4 5; do (sh -c 'exit 1' & exit 2) & done; wait; exit 3"}`)
		if !strings.Contains(body, `"exit_code":3`) {
			t.Errorf("an end was mixed up: %s", body)
		}
	}
	for deadline := time.Now().Add(5 * time.Second); ; {
		_, body := s.do("POST", "/command", `{"argv":["sh","-c","grep -l 'State:.Z' /proc/[0-9]*/status"]}`)
		if strings.Contains(body, `"exit_code":1`) { // grep has found nothing
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("zombies: %s", body)
		}
	}
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
