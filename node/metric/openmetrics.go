// SPDX-License-Identifier: Apache-2.0

package metric

import (
	"fmt"
	"strconv"
	"strings"
)

// openMetrics writes the figures as OpenMetrics text, of which Prometheus is the best known reader. Families that are
// not known are left out; sums of the whole machine are not the sandbox's and are left out too.
func openMetrics(f figures) []byte {
	var out strings.Builder
	family := func(name, kind, unit, help string, value float64, known bool) {
		if !known {
			return
		}
		name = "opensandbox_sandbox_" + name
		fmt.Fprintf(&out, "# TYPE %s %s\n", name, kind)
		if unit != "" {
			fmt.Fprintf(&out, "# UNIT %s %s\n", name, unit)
		}
		fmt.Fprintf(&out, "# HELP %s %s\n", name, help)
		if kind == "counter" {
			name += "_total"
		}
		fmt.Fprintf(&out, "%s %s\n", name, strconv.FormatFloat(value, 'f', -1, 64))
	}
	own := !f.machine
	family("cpu_seconds", "counter", "seconds", "Time that its processes had a processor.", f.CPU.Seconds(), own)
	family("cpus", "gauge", "", "Processors it may use.", f.cpus, true)
	family("memory_used_bytes", "gauge", "bytes", "Memory in use, page cache included where a cgroup counts it.", float64(f.Memory), own)
	family("memory_total_bytes", "gauge", "bytes", "Memory it may use.", float64(f.memoryTotal), f.memoryTotal > 0)
	family("memory_peak_bytes", "gauge", "bytes", "The most memory it has used.", float64(f.MemoryPeak), own && f.MemoryPeak > 0)
	family("oom_kills", "counter", "", "Processes that were killed because it had no memory left.", float64(f.OOMKills), own && f.MemoryPeak > 0)
	family("pids", "gauge", "", "Processes and threads.", float64(f.Pids), own && f.Pids > 0)
	family("pids_limit", "gauge", "", "Processes and threads it may have.", float64(f.PidsLimit), own && f.PidsLimit > 0)
	family("disk_total_bytes", "gauge", "bytes", "Size of the file system that holds its files.", float64(f.disk), f.disk > 0)
	family("network_received_bytes", "counter", "bytes", "Received on all interfaces but loopback.", float64(f.received), f.network)
	family("network_sent_bytes", "counter", "bytes", "Sent on all interfaces but loopback.", float64(f.sent), f.network)
	out.WriteString("# EOF\n")
	return []byte(out.String())
}
