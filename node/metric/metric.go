// SPDX-License-Identifier: Apache-2.0

// Package metric tells how much of the machine a sandbox uses: once, every second, and as OpenMetrics text.
//
// What the kernel counts for the sandbox's cgroup is told as it is. Without a cgroup, or without one of its
// controllers, the sandbox's own /proc is added up, as far as that is true. What nobody can tell is left out.
package metric

import (
	"net/http"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// Meter is what the sandbox's cgroup counts.
type Meter interface {
	Read() (cgroup.Usage, error)
}

const (
	// shortest is the least time over which a CPU share means something; below it the last one is told again.
	shortest = 50 * time.Millisecond
	// every is how often a watch tells.
	every = time.Second
	// patience is how long a watcher may take to read a line before it counts as gone.
	patience = 30 * time.Second
)

// Gauge answers /metrics. The CPU share is that since the last question, or since the start: no question waits for a
// second sample.
type Gauge struct {
	meter Meter // nil: there is no cgroup
	alone bool  // /proc and the network are the sandbox's own
	now   func() time.Time
	tick  func() (ticks <-chan time.Time, stop func())

	mu    sync.Mutex
	share share
	once  sync.Once
	ended chan struct{}
}

// New starts to measure. m is nil where there is no cgroup. As pid 1 this process is alone with what it has started;
// elsewhere the figures without a cgroup are those of the whole machine.
func New(m Meter) *Gauge {
	g := &Gauge{meter: m, alone: os.Getpid() == 1, now: time.Now, tick: ticker, ended: make(chan struct{})}
	g.share.at = g.now()
	if f, err := g.measure(); err == nil {
		g.share.cpu = f.CPU
	}
	return g
}

func ticker() (ticks <-chan time.Time, stop func()) {
	t := time.NewTicker(every)
	return t.C, t.Stop
}

// Close ends all watches.
func (g *Gauge) Close() { g.once.Do(func() { close(g.ended) }) }

// share is how much CPU is used between two questions of the same caller.
type share struct {
	at   time.Time
	cpu  time.Duration
	last float64
}

func (s *share) percent(now time.Time, cpu time.Duration, cpus float64) float64 {
	if passed := now.Sub(s.at); passed >= shortest {
		s.last = min(100, max(0, 100*float64(cpu-s.cpu)/float64(passed)/cpus))
		s.at, s.cpu = now, cpu
	}
	return s.last
}

// figures are what is known at one moment. Zero means unknown, but for those of the network.
type figures struct {
	cgroup.Usage
	machine        bool // CPU and Memory are the whole machine's: there is no word on the sandbox alone
	cpus           float64
	memoryTotal    int64
	disk           int64
	network        bool
	received, sent int64
}

func (g *Gauge) measure() (figures, error) {
	f, err := g.usage()
	if err != nil {
		return f, err
	}
	f.cpus, f.memoryTotal = float64(f.CPULimitMillis)/1000, f.MemoryLimit
	if f.cpus <= 0 {
		f.cpus = float64(runtime.NumCPU())
	}
	if f.memoryTotal <= 0 {
		f.memoryTotal = machineMemory("MemTotal:")
	}
	// How much of it the sandbox has used cannot be told: the file system is not its own.
	var root unix.Statfs_t
	if err := unix.Statfs("/", &root); err == nil {
		f.disk = int64(root.Blocks) * root.Bsize
	}
	if g.alone {
		f.received, f.sent, f.network = traffic()
	}
	return f, nil
}

// usage is the cgroup's; what no controller counts is added up from /proc.
func (g *Gauge) usage() (f figures, err error) {
	if g.meter != nil {
		if f.Usage, err = g.meter.Read(); err != nil {
			return f, err
		}
	}
	if f.CPU > 0 && f.Memory > 0 && f.Pids > 0 {
		return f, nil
	}
	if !g.alone {
		if g.meter == nil {
			f.Usage, err = machine()
			f.machine = true
		}
		return f, err
	}
	own, err := processes()
	if err != nil {
		return f, err
	}
	if f.CPU == 0 {
		f.CPU = own.CPU
	}
	if f.Memory == 0 {
		f.Memory = own.Memory
	}
	if f.Pids == 0 {
		f.Pids = own.Pids
	}
	return f, nil
}

// metrics gives the figures in the contract's form, with the share since s was asked last.
func (g *Gauge) metrics(s *share) (wire.Metrics, error) {
	f, err := g.measure()
	if err != nil {
		return wire.Metrics{}, err
	}
	now := g.now()
	m := wire.Metrics{
		CPUCount: f.cpus, CPUUsedPct: s.percent(now, f.CPU, f.cpus), MemTotalMib: mib(f.memoryTotal), MemUsedMib: mib(f.Memory),
		Timestamp: now.UnixMilli(),
	}
	if f.disk > 0 {
		m.DiskTotalMib = known(mib(f.disk))
	}
	if f.network {
		m.NetworkReceivedBytes, m.NetworkSentBytes = &f.received, &f.sent
	}
	if f.machine {
		return m, nil
	}
	m.CPUTimeMs = known(f.CPU.Milliseconds())
	if f.Pids > 0 {
		m.Pids = known(int(f.Pids))
	}
	if f.PidsLimit > 0 {
		m.PidsLimit = known(int(f.PidsLimit))
	}
	if f.MemoryPeak > 0 { // then there is a controller of memory, which counts kills too
		m.MemPeakMib, m.OomKills = known(mib(f.MemoryPeak)), &f.OOMKills
	}
	return m, nil
}

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }

func known[T any](v T) *T { return &v }

// Read gives the figures of now.
func (g *Gauge) Read() (wire.Metrics, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.metrics(&g.share)
}

// Routes adds the metrics API.
func (g *Gauge) Routes(mux *http.ServeMux) {
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		m, err := g.Read()
		if err != nil {
			unreadable(w, r, err)
			return
		}
		reply.JSON(w, http.StatusOK, m)
	})
	mux.HandleFunc("GET /metrics/watch", g.watch)
	mux.HandleFunc("GET /metrics/prometheus", func(w http.ResponseWriter, r *http.Request) {
		f, err := g.measure()
		if err != nil {
			unreadable(w, r, err)
			return
		}
		w.Header().Set("Content-Type", "application/openmetrics-text; version=1.0.0; charset=utf-8")
		_, _ = w.Write(openMetrics(f))
	})
}

func unreadable(w http.ResponseWriter, r *http.Request, err error) {
	reply.Error(w, r, reply.Errorf(wire.CodeRuntimeError, "The counters cannot be read: %v", err))
}

// watch writes a line at once and then every second, until the client goes, does not read any more, or the sandbox
// ends. It runs in the request's own goroutine; each watch has a CPU share of its own.
func (g *Gauge) watch(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	s := g.share
	g.mu.Unlock()
	m, err := g.metrics(&s)
	if err != nil {
		unreadable(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	if r.Method == http.MethodHead {
		return
	}
	control := http.NewResponseController(w)
	ticks, stop := g.tick()
	defer stop()
	for {
		line, err := reply.Marshal(m)
		if err != nil {
			panic(err) // plain numbers: it cannot
		}
		_ = control.SetWriteDeadline(time.Now().Add(patience))
		if _, err := w.Write(append(line, '\n')); err != nil || control.Flush() != nil {
			return
		}
		select {
		case <-ticks:
		case <-r.Context().Done():
			return
		case <-g.ended:
			return
		}
		if m, err = g.metrics(&s); err != nil {
			return // the cgroup is gone, and with it the sandbox
		}
	}
}
