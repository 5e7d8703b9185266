// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNoMeter says that this host has no groups to read from.
var ErrNoMeter = errors.New("cgroup: this host has no control groups to measure with")

// Usage of the payload, as the kernel counts it. Memory includes the page cache its files fill, which
// the kernel drops before it kills: nothing is subtracted. A limit of 0 means none. Pids counts threads too;
// PidsRefused is how often a fork was refused because of the limit, ever.
type Usage struct {
	CPU                                             time.Duration
	CPULimitMillis, Memory, MemoryPeak, MemoryLimit int64
	Pids, PidsLimit, PidsRefused, OOMKills          int64
}

// Meter reads a payload's usage through fds opened by the launcher, so that it works inside too.
type Meter struct {
	version string
	files   []*os.File
}

// The order of a meter's files. A file the kernel does not have is /dev/null: it reads as empty.
var meterFiles = map[string][]struct{ controller, name string }{
	V1: {
		{"cpuacct", "cpuacct.usage"},
		{"cpu", "cpu.cfs_quota_us"},
		{"cpu", "cpu.cfs_period_us"},
		{"memory", "memory.usage_in_bytes"},
		{"memory", "memory.max_usage_in_bytes"},
		{"memory", "memory.limit_in_bytes"},
		{"memory", "memory.oom_control"},
		{"pids", "pids.current"},
		{"pids", "pids.max"},
		{"pids", "pids.events"}, // Linux 4.8
	},
	V2: {
		{"", "cpu.stat"},
		{"cpu", "cpu.max"},
		{"memory", "memory.current"},
		{"memory", "memory.peak"}, // Linux 5.19
		{"memory", "memory.max"},
		{"memory", "memory.events"},
		{"pids", "pids.current"},
		{"pids", "pids.max"},
		{"pids", "pids.events"}, // Linux 4.8
	},
}

// Meter opens the payload's counters.
func (g *Group) Meter() (*Meter, error) {
	if g.host.version == None {
		return nil, ErrNoMeter
	}
	m := &Meter{version: g.host.version}
	for _, want := range meterFiles[m.version] {
		path := os.DevNull
		if i, ok := g.host.holding(want.controller); ok || m.version == V2 {
			path = filepath.Join(g.dirs[i], payloadLeaf, want.name)
		}
		f, err := os.Open(path)
		if missing(err) {
			if _, gone := os.Stat(filepath.Dir(path)); gone != nil {
				m.Close()
				return nil, gone
			}
			f, err = os.Open(os.DevNull)
		}
		if err != nil {
			m.Close()
			return nil, err
		}
		m.files = append(m.files, f)
	}
	return m, nil
}

// Files are what to hand to init, in the order MeterFromFiles wants them.
func (m *Meter) Files() []*os.File { return m.files }

// MeterFromFiles rebuilds a meter from inherited files; version is Host.Version of the launcher.
func MeterFromFiles(version string, files []*os.File) *Meter {
	return &Meter{version: version, files: files}
}

// Read takes the figures. Safe for concurrent use. Once the group is removed it fails with ENODEV.
func (m *Meter) Read() (Usage, error) {
	want := meterFiles[m.version]
	if len(want) == 0 || len(m.files) != len(want) {
		return Usage{}, ErrNoMeter
	}
	text := make(map[string]string, len(want))
	buf := make([]byte, 4096)
	for i, f := range m.files {
		n, err := unix.Pread(int(f.Fd()), buf, 0)
		if err != nil {
			return Usage{}, fmt.Errorf("read %s: %w", want[i].name, err)
		}
		text[want[i].name] = strings.TrimSpace(string(buf[:n]))
	}
	if m.version == V2 {
		return usageV2(text), nil
	}
	return usageV1(text), nil
}

func usageV1(text map[string]string) Usage {
	return Usage{
		CPU:            time.Duration(number(text["cpuacct.usage"])),
		CPULimitMillis: millis(text["cpu.cfs_quota_us"], text["cpu.cfs_period_us"]),
		Memory:         number(text["memory.usage_in_bytes"]),
		MemoryPeak:     number(text["memory.max_usage_in_bytes"]),
		MemoryLimit:    limited(text["memory.limit_in_bytes"]),
		Pids:           number(text["pids.current"]),
		PidsLimit:      limited(text["pids.max"]),
		PidsRefused:    max(fieldOf(text["pids.events"], "max"), 0),
		OOMKills:       max(fieldOf(text["memory.oom_control"], "oom_kill"), 0),
	}
}

func usageV2(text map[string]string) Usage {
	quota, period, _ := strings.Cut(text["cpu.max"], " ")
	return Usage{
		CPU:            time.Duration(max(fieldOf(text["cpu.stat"], "usage_usec"), 0)) * time.Microsecond,
		CPULimitMillis: millis(quota, period),
		Memory:         number(text["memory.current"]),
		MemoryPeak:     number(text["memory.peak"]),
		MemoryLimit:    limited(text["memory.max"]),
		Pids:           number(text["pids.current"]),
		PidsLimit:      limited(text["pids.max"]),
		PidsRefused:    max(fieldOf(text["pids.events"], "max"), 0),
		OOMKills:       max(fieldOf(text["memory.events"], "oom_kill"), 0),
	}
}

func number(s string) int64 {
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}

// millis: v1 says -1 and v2 says max where there is no quota.
func millis(quota, period string) int64 {
	q, p := number(quota), number(period)
	if q <= 0 || p <= 0 {
		return 0
	}
	return q * 1000 / p
}

// limited: v2, and v1 for processes, says max; v1 shows the largest multiple of a page below 2^63.
func limited(s string) int64 {
	if n := number(s); n < 1<<62 {
		return n
	}
	return 0
}

// Close closes the fds.
func (m *Meter) Close() {
	for _, f := range m.files {
		f.Close()
	}
}
