// SPDX-License-Identifier: Apache-2.0

package metric

import (
	"bufio"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/testleak"
	"opensandbox.io/node/wire"
)

func TestMain(m *testing.M) {
	if os.Getpid() == 1 {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			panic(err)
		}
		if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
			panic(err)
		}
	}
	testleak.Main(m)
}

type fake struct {
	usage cgroup.Usage
	err   error
}

func (f *fake) Read() (cgroup.Usage, error) { return f.usage, f.err }

var all = cgroup.Usage{
	CPU: time.Second, CPULimitMillis: 500, Memory: 3 << 20, MemoryLimit: 8 << 20, MemoryPeak: 4 << 20, Pids: 7, PidsLimit: 64, OOMKills: 2,
}

func TestShareIsSinceTheLastQuestion(t *testing.T) {
	now := time.Unix(1000, 0)
	m := &fake{usage: all}
	g := New(m)
	g.now, g.share.at = func() time.Time { return now }, now
	step := func(wall, cpu time.Duration, want float64) {
		t.Helper()
		now = now.Add(wall)
		m.usage.CPU += cpu
		got, err := g.Read()
		if err != nil || got.CPUUsedPct != want {
			t.Errorf("got %v %v, want %v", got.CPUUsedPct, err, want)
		}
		if got.CPUCount != 0.5 || got.MemTotalMib != 8 || got.MemUsedMib != 3 || got.Timestamp != now.UnixMilli() {
			t.Errorf("got %+v", got)
		}
	}
	step(2*time.Second, 500*time.Millisecond, 50) // since the start
	step(time.Second, 500*time.Millisecond, 100)
	step(time.Second, time.Second, 100) // a burst over the quota is not more than all
	step(time.Millisecond, time.Millisecond, 100)
	step(999*time.Millisecond, 124*time.Millisecond, 25) // with the short one before it
	step(time.Second, 0, 0)
}

func TestWhatACgroupCounts(t *testing.T) {
	g := New(&fake{usage: all})
	m, err := g.Read()
	if err != nil || m.Pids == nil || *m.Pids != 7 || *m.PidsLimit != 64 || *m.MemPeakMib != 4 || *m.OomKills != 2 || *m.CPUTimeMs != 1000 || *m.DiskTotalMib <= 0 {
		t.Errorf("got %+v %v", m, err)
	}
	if m.DiskUsedMib != nil || m.NetworkSentBytes != nil {
		t.Errorf("what is not the sandbox's alone was told: %+v", m)
	}
}

func TestNoLimitMeansTheMachine(t *testing.T) {
	for _, m := range []Meter{&fake{}, nil} {
		got, err := New(m).Read()
		if err != nil || got.CPUCount != float64(runtime.NumCPU()) || got.MemTotalMib < 100 || got.CPUUsedPct < 0 || got.CPUUsedPct > 100 {
			t.Errorf("got %+v %v", got, err)
		}
		if got.Pids != nil || got.PidsLimit != nil || got.MemPeakMib != nil || got.OomKills != nil || got.NetworkReceivedBytes != nil || m == nil && got.CPUTimeMs != nil {
			t.Errorf("figures of the machine are told as the sandbox's: %+v", got)
		}
	}
}

// Without a cgroup the sandbox's own /proc is added up. The test starts itself as pid 1 of a namespace to see that.
func TestWithoutACgroup(t *testing.T) {
	if os.Getpid() == 1 {
		ownProc(t)
		return
	}
	if os.Getuid() != 0 {
		t.Skip("namespaces need root")
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestWithoutACgroup$", "-test.v")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestWithoutACgroup") {
		t.Errorf("%v\n%s", err, out)
	}
}

func ownProc(t *testing.T) {
	g := New(nil)
	before, err := g.Read()
	if err != nil || before.Pids != nil || before.MemUsedMib != 0 || *before.CPUTimeMs != 0 {
		t.Fatalf("with nobody there: %+v %v", before, err)
	}
	if before.NetworkReceivedBytes == nil || *before.NetworkReceivedBytes != 0 || before.OomKills != nil || before.PidsLimit != nil {
		t.Errorf("got %+v", before)
	}
	// It has a name that looks like the end of one, uses a processor for a while, then holds memory and waits.
	// The first half of its time is a child's that has ended.
	script := `printf %s ') R 9 9 9' >/proc/self/comm; (i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done); i=0
while [ $i -lt 100000 ]; do i=$((i+1)); done; x=$(head -c 8000000 /dev/zero | tr '\0' x); echo ready; read wait`
	cmd := exec.Command("sh", "-c", script)
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = bufio.NewReader(out).ReadString('\n')
	during, err := g.Read()
	if err != nil || *during.Pids != 1 || during.MemUsedMib < 7 || during.MemUsedMib > 100 || *during.CPUTimeMs < 20 || *during.CPUTimeMs > 60_000 {
		t.Errorf("with one: %+v %v", during, err)
	}
	_ = in.Close()
	_ = cmd.Wait()
	after, err := g.Read()
	if err != nil || after.Pids != nil || after.MemUsedMib != 0 || *after.CPUTimeMs < *during.CPUTimeMs {
		t.Errorf("afterwards: %+v %v, was %v ms", after, err, *during.CPUTimeMs)
	}
}

func TestTrafficLeavesLoopbackOut(t *testing.T) {
	head := "Inter-|   Receive    |  Transmit\n face |bytes    packets|bytes    packets\n"
	line := "    lo: 100 1 0 0 0 0 0 0 200 2 0 0 0 0 0 0\n"
	eth := "  eth0:1000 1 0 0 0 0 0 0 2000 2 0 0 0 0 0 0\n wlan0: 1 1 0 0 0 0 0 0 2 2 0 0 0 0 0 0\n"
	for text, want := range map[string][3]int64{head + line: {0, 0, 1}, head + line + eth: {1001, 2002, 1}, head: {0, 0, 0}, "": {0, 0, 0}} {
		received, sent, ok := parseTraffic(text)
		if received != want[0] || sent != want[1] || ok != (want[2] == 1) {
			t.Errorf("%q: %d %d %v", text, received, sent, ok)
		}
	}
}

func TestUnreadableCountersAreAnError(t *testing.T) {
	mux := http.NewServeMux()
	New(&fake{err: errors.New("gone")}).Routes(mux)
	for _, path := range []string{"/metrics", "/metrics/watch", "/metrics/prometheus"} {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		if w.Code != 500 {
			t.Errorf("%s: got %d", path, w.Code)
		}
	}
}

// watching serves a gauge whose seconds the test makes.
func watching(t *testing.T) (g *Gauge, m *fake, seconds chan time.Time, lines *bufio.Scanner, leave func()) {
	t.Helper()
	m = &fake{usage: all}
	g = New(m)
	seconds = make(chan time.Time)
	g.tick = func() (<-chan time.Time, func()) { return seconds, func() { close(seconds) } }
	mux := http.NewServeMux()
	g.Routes(mux)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	answer, err := http.Get(server.URL + "/metrics/watch")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { answer.Body.Close() })
	if answer.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Errorf("%v", answer.Header)
	}
	return g, m, seconds, bufio.NewScanner(answer.Body), func() { answer.Body.Close() }
}

func TestWatchTellsAtOnceAndThenEverySecond(t *testing.T) {
	g, m, seconds, lines, _ := watching(t)
	for want := 7; want < 10; want++ {
		var got wire.Metrics
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &got) != nil || *got.Pids != want {
			t.Fatalf("%q %v", lines.Text(), lines.Err())
		}
		m.usage.Pids++
		seconds <- time.Time{}
	}
	lines.Scan()
	g.Close()
	g.Close()
	if lines.Scan() {
		t.Errorf("it goes on: %s", lines.Text())
	}
	<-seconds
}

func TestWatchEndsWithItsClient(t *testing.T) {
	_, _, seconds, lines, leave := watching(t)
	lines.Scan()
	leave()
	<-seconds // closed when the watch has stopped its clock
}

func TestWatchOfNobody(t *testing.T) {
	mux := http.NewServeMux()
	New(&fake{usage: all}).Routes(mux)
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest("HEAD", "/metrics/watch", nil)) // would never return
	if w.Code != 200 || w.Body.Len() > 0 {
		t.Errorf("%d %q", w.Code, w.Body)
	}
}

func TestOpenMetrics(t *testing.T) {
	f := figures{Usage: all, cpus: 0.5, memoryTotal: 8 << 20, disk: 1 << 40, network: true, received: 1e15 + 1}
	text := string(openMetrics(f))
	for _, want := range []string{
		"# TYPE opensandbox_sandbox_cpu_seconds counter\n# UNIT opensandbox_sandbox_cpu_seconds seconds\n# HELP opensandbox_sandbox_cpu_seconds ",
		"\nopensandbox_sandbox_cpu_seconds_total 1\n", "\nopensandbox_sandbox_cpus 0.5\n", "\nopensandbox_sandbox_pids 7\n", "\nopensandbox_sandbox_oom_kills_total 2\n",
		"\nopensandbox_sandbox_memory_used_bytes 3145728\n", "\nopensandbox_sandbox_network_received_bytes_total 1000000000000001\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	// The grammar: for each family its type, its unit if it has one, its help, and one sample; then the end.
	grammar := `^(# TYPE (\w+) (counter|gauge)\n(# UNIT \w+ [a-z]+\n)?# HELP \w+ [^\n]+\n\w+ [0-9.]+\n)+# EOF\n$`
	if !regexp.MustCompile(grammar).MatchString(text) {
		t.Errorf("not OpenMetrics:\n%s", text)
	}
	for line := range strings.Lines(text) {
		name := strings.TrimPrefix(strings.TrimPrefix(line, "# UNIT "), "opensandbox")
		if f := strings.Fields(name); strings.HasPrefix(line, "# UNIT") && !strings.HasSuffix(f[0], "_"+f[1]) {
			t.Errorf("a name must end with its unit: %s", line)
		}
	}
	f = figures{Usage: cgroup.Usage{CPU: time.Hour, Memory: 1 << 40}, machine: true, cpus: 2, memoryTotal: 1 << 41}
	if text := string(openMetrics(f)); strings.Contains(text, "cpu_seconds") || strings.Contains(text, "memory_used") || strings.Contains(text, "network") || !strings.HasSuffix(text, "# EOF\n") {
		t.Errorf("figures of the machine:\n%s", text)
	}
}
