// SPDX-License-Identifier: Apache-2.0

// Package metric tells how much of its CPU and memory a sandbox uses.
package metric

import (
	"bufio"
	"bytes"
	"errors"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// Meter is what the sandbox's cgroup counts.
type Meter interface {
	Read() (cgroup.Usage, error)
}

// shortest is the least time over which a CPU share means something; below it the last one is told again.
const shortest = 50 * time.Millisecond

// Gauge answers /metrics. The CPU share is that since the last question, or since the start: no question waits for a
// second sample.
type Gauge struct {
	meter Meter // nil: figures of the whole machine, where execd runs without a cgroup of its own
	now   func() time.Time

	mu   sync.Mutex
	at   time.Time
	cpu  time.Duration
	last float64
}

// New starts to measure.
func New(m Meter) *Gauge {
	g := &Gauge{meter: m, now: time.Now}
	if m == nil {
		g.meter = machine{}
	}
	g.at = g.now()
	if u, err := g.meter.Read(); err == nil {
		g.cpu = u.CPU
	}
	return g
}

// Read gives the figures of now.
func (g *Gauge) Read() (wire.Metrics, error) {
	u, err := g.meter.Read()
	if err != nil {
		return wire.Metrics{}, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.now()
	cpus := float64(u.CPULimitMillis) / 1000
	if cpus <= 0 {
		cpus = float64(runtime.NumCPU())
	}
	if passed := now.Sub(g.at); passed >= shortest {
		share := 100 * float64(u.CPU-g.cpu) / float64(passed) / cpus
		g.last = min(100, max(0, share))
		g.at, g.cpu = now, u.CPU
	}
	total := u.MemoryLimit
	if total <= 0 {
		total = machineMemory("MemTotal:")
	}
	const mib = 1 << 20
	return wire.Metrics{
		CPUCount: cpus, CPUUsedPct: g.last, MemTotalMib: float64(total) / mib, MemUsedMib: float64(u.Memory) / mib,
		Timestamp: now.UnixMilli(),
	}, nil
}

// Routes adds the metrics API.
func (g *Gauge) Routes(mux *http.ServeMux) {
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		m, err := g.Read()
		if err != nil {
			reply.Error(w, r, reply.Errorf(wire.CodeRuntimeError, "The counters cannot be read: %v", err))
			return
		}
		reply.JSON(w, http.StatusOK, m)
	})
}

// machine reads the figures of the whole machine as this process sees it.
type machine struct{}

func (machine) Read() (cgroup.Usage, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return cgroup.Usage{}, err
	}
	line, _, _ := bytes.Cut(stat, []byte("\n"))
	f := strings.Fields(string(line))
	if len(f) < 9 || f[0] != "cpu" {
		return cgroup.Usage{}, errors.New("/proc/stat has no cpu line")
	}
	var ticks int64
	for i, text := range f[1:9] {
		if n, err := strconv.ParseInt(text, 10, 64); err == nil && i != 3 && i != 4 { // idle, iowait
			ticks += n
		}
	}
	total := machineMemory("MemTotal:")
	return cgroup.Usage{
		CPU:         time.Duration(ticks) * (time.Second / 100), // USER_HZ is 100 on every architecture we build for
		Memory:      total - machineMemory("MemAvailable:"),
		MemoryLimit: total,
	}, nil
}

func machineMemory(key string) int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), key); ok {
			n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return n << 10
		}
	}
	return 0
}
