// SPDX-License-Identifier: Apache-2.0

package metric

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"
	"time"

	"opensandbox.io/node/cgroup"
)

// userHZ is the unit of times in /proc: 100 on every architecture we build for.
const userHZ = 100

func ticks(n int64) time.Duration { return time.Duration(n) * (time.Second / userHZ) }

// machine reads the figures of the whole machine as this process sees it.
func machine() (cgroup.Usage, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return cgroup.Usage{}, err
	}
	line, _, _ := bytes.Cut(stat, []byte("\n"))
	f := strings.Fields(string(line))
	if len(f) < 9 || f[0] != "cpu" {
		return cgroup.Usage{}, errors.New("/proc/stat has no cpu line")
	}
	var used int64
	for i, text := range f[1:9] {
		if i != 3 && i != 4 { // idle, iowait
			used += number(text)
		}
	}
	total := machineMemory("MemTotal:")
	return cgroup.Usage{CPU: ticks(used), Memory: total - machineMemory("MemAvailable:"), MemoryLimit: total}, nil
}

func machineMemory(key string) int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), key); ok {
			return number(strings.TrimSuffix(strings.TrimSpace(rest), " kB")) << 10
		}
	}
	return 0
}

// processes adds up what runs in this pid namespace, but for this process, which is not the payload. Time of processes
// that have ended is that of their parents, who waited for them, up to us, who wait for all others. Memory is what each
// process has for itself: what several share by copy-on-write counts for each, what they map from files for none.
func processes() (u cgroup.Usage, err error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return u, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return u, err
	}
	page := int64(os.Getpagesize())
	for _, name := range names {
		if name[0] < '1' || name[0] > '9' {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // it has just ended
		}
		own, children, threads := parseStat(string(stat))
		u.CPU += children
		if name == "1" {
			continue
		}
		u.CPU += own
		u.Pids += threads
		if memory, err := os.ReadFile("/proc/" + name + "/statm"); err == nil {
			if f := strings.Fields(string(memory)); len(f) >= 3 {
				u.Memory += max(0, number(f[1])-number(f[2])) * page
			}
		}
	}
	return u, nil
}

// parseStat reads /proc/PID/stat. The name of a program is its own to choose and may hold anything, brackets too.
func parseStat(stat string) (own, children time.Duration, threads int64) {
	f := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(f) < 18 { // the first is field 3 of proc(5)
		return 0, 0, 0
	}
	return ticks(number(f[11]) + number(f[12])), ticks(number(f[13]) + number(f[14])), number(f[17])
}

// traffic adds up all interfaces but loopback.
func traffic() (received, sent int64, ok bool) {
	text, err := os.ReadFile("/proc/self/net/dev")
	if err != nil {
		return 0, 0, false
	}
	return parseTraffic(string(text))
}

func parseTraffic(text string) (received, sent int64, ok bool) {
	for line := range strings.Lines(text) {
		name, counters, found := strings.Cut(line, ":")
		f := strings.Fields(counters)
		if !found || len(f) < 16 { // the two lines of headings have no colon
			continue
		}
		ok = true
		if strings.TrimSpace(name) != "lo" {
			received += number(f[0])
			sent += number(f[8])
		}
	}
	return received, sent, ok
}

func number(s string) int64 {
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}
