// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"encoding/json"
	"fmt"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/enter"
	"opensandbox.io/node/launch"
	"opensandbox.io/node/wire"
)

// enforceable takes away the limits this host has no controller for; what is taken away is reported, not refused.
func enforceable(h *cgroup.Host, l cgroup.Limits) cgroup.Limits {
	if !h.Has("cpu") {
		l.CPUMillis = 0
	}
	if !h.Has("memory") {
		l.MemoryBytes = 0
	}
	if !h.Has("pids") {
		l.Pids = 0
	}
	return l
}

// isolation is what holds this sandbox, and by what means.
func (d *Daemon) isolation(p *plan, enforced cgroup.Limits, block *launch.Block) map[string]any {
	yes, rootless := true, d.rootless
	users := fmt.Sprintf("0-%d inside are %d-%d outside", launch.BlockSize-1, block.UID(), block.UID()+launch.BlockSize-1)
	root := "overlay on the image host, idmapped; /usr of this host read-only"
	if rootless {
		users = "0 inside is the user of sandboxd outside; there is no other"
		root = "overlay on the image host; /usr of this host read-only"
	}
	namespaces := []string{"user", "mount", "pid", "ipc", "uts", "network"}
	if d.cgroups.Version() != cgroup.None {
		namespaces = append(namespaces, "cgroup")
	}
	var capabilities []string
	for _, c := range enter.Kept {
		capabilities = append(capabilities, c.Name)
	}
	filter := p.profile
	if filter == string(wire.LaunchRequestProfileIsolated) {
		filter = string(wire.LaunchRequestProfileStrict) // of commands; only execd may make namespaces
	}
	return asMap(wire.Isolation{
		Runtime: "local", Rootless: &rootless, Namespaces: namespaces, Users: users, Root: root,
		Seccomp: filter, Capabilities: capabilities, NoNewPrivileges: &yes,
		Limits:  limits(d.cgroups.Version(), p.limits, enforced),
		Network: &wire.Enforcement{Means: "none: only loopback inside"},
		Missing: d.missing,
	})
}

func limits(version string, asked, enforced cgroup.Limits) map[string]wire.Enforcement {
	files := map[string]map[string]string{
		cgroup.V1: {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes, no swap", "pids": "pids.max"},
		cgroup.V2: {"cpu": "cpu.max", "memory": "memory.max, no swap", "pids": "pids.max"},
	}[version]
	one := func(name, value string, limited bool) wire.Enforcement {
		if !limited {
			return wire.Enforcement{Means: "none"}
		}
		return wire.Enforcement{Value: value, Means: "cgroup " + version + " " + files[name]}
	}
	return map[string]wire.Enforcement{
		"cpu":    one("cpu", fmt.Sprintf("%dm", asked.CPUMillis), enforced.CPUMillis > 0),
		"memory": one("memory", quantity(asked.MemoryBytes), enforced.MemoryBytes > 0),
		"pids":   one("pids", fmt.Sprint(asked.Pids), enforced.Pids > 0),
		"disk":   {Means: "none"},
	}
}

// asMap is the value as the contract of the node carries it: an open object.
func asMap(v any) map[string]any {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // a struct of strings
	}
	var m map[string]any
	if err := json.Unmarshal(text, &m); err != nil {
		panic(err)
	}
	return m
}

// missingRights lists what this host withholds, each with the command that grants it.
func missingRights(h *cgroup.Host, rootless bool) []string {
	missing := []string{}
	if rootless {
		missing = append(missing, "a range of user ids (one user inside): run opensandbox-server as root")
	}
	grant := "run opensandbox-server as root"
	if rootless {
		grant = "systemd-run --user --scope -p Delegate=yes opensandbox-server, or run it as root"
	}
	for _, c := range []struct{ controller, what string }{
		{"cpu", "cpu limit"}, {"memory", "memory limit"}, {"pids", "process limit"},
	} {
		if !h.Has(c.controller) {
			missing = append(missing, fmt.Sprintf("%s (no writable cgroup with the %s controller): %s", c.what, c.controller, grant))
		}
	}
	return missing
}
