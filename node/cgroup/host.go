// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Versions as Host.Version reports them.
const (
	V1   = "v1"
	V2   = "v2"
	None = "none"
)

// limiting are the controllers a sandbox's limits need.
var limiting = []string{"cpu", "memory", "pids"}

// joined are the v1 controllers whose hierarchies a sandbox gets a directory in.
var joined = []string{"cpu", "cpuacct", "memory", "pids", "freezer"}

// Host is what this machine offers: one directory per v1 hierarchy in use, or the one of v2.
type Host struct {
	version string
	hiers   []hierarchy

	// mu guards the v2 tree's preparation; one Host serves one tree.
	mu        sync.Mutex
	namespace *os.File // rooted at the tree; v2 only
	came      string   // the v2 directory this process was in before Prepare
}

// hierarchy is one mounted tree of groups that this process may add to.
type hierarchy struct {
	base        string // directory below which trees are made
	own         string // directory this process is in
	controllers []string
}

// leaves tells whether the two leaves are needed: the freezer always takes the whole slot.
func (y hierarchy) leaves() bool {
	return !slices.Equal(y.controllers, []string{"freezer"})
}

// Version is "v1", "v2", or "none" when this process may not make groups.
func (h *Host) Version() string { return h.version }

// Has tells whether limits of that controller ("cpu", "memory", "pids", "freezer") can be enforced.
func (h *Host) Has(controller string) bool {
	if controller == "freezer" && h.version == V2 {
		return true
	}
	_, ok := h.holding(controller)
	return ok
}

func (h *Host) holding(controller string) (int, bool) {
	for i, y := range h.hiers {
		if slices.Contains(y.controllers, controller) {
			return i, true
		}
	}
	return 0, false
}

// MissingController says that a limit was asked for that this host cannot enforce.
type MissingController struct {
	Controller string
	Version    string
}

func (e *MissingController) Error() string {
	return fmt.Sprintf("cgroup %s on this host has no usable %s controller", e.Version, e.Controller)
}

// Detect finds the hierarchies this process may use. On hybrid hosts v2 counts only if it holds the
// controllers that limit; a v2 mount without them is ignored. A machine without any is no error:
// its Version is "none".
func Detect() (*Host, error) {
	mounts, err := readLines("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	// Not /proc/self: a thread of a launcher may stand elsewhere than the main one.
	membership, err := readLines("/proc/thread-self/cgroup")
	if err != nil {
		return nil, err
	}
	return detect(parseMounts(mounts), parseMembership(membership)), nil
}

func detect(mounts []mount, own map[string]string) *Host {
	v1 := detectV1(mounts, own)
	v2 := detectV2(mounts, own)
	switch {
	case v2 != nil && containsAll(v2.controllers, limiting):
		return &Host{version: V2, hiers: []hierarchy{*v2}}
	case slices.ContainsFunc(v1, func(y hierarchy) bool { return containsAny(y.controllers, limiting) }):
		return &Host{version: V1, hiers: v1}
	case v2 != nil && containsAny(v2.controllers, limiting):
		// A user session often has memory and pids delegated but not cpu: better than nothing.
		return &Host{version: V2, hiers: []hierarchy{*v2}}
	}
	return &Host{version: None}
}

func detectV1(mounts []mount, own map[string]string) []hierarchy {
	var found []hierarchy
	taken := map[string]bool{}
	for _, m := range mounts {
		if m.fstype != "cgroup" {
			continue
		}
		var has []string
		for _, c := range joined {
			if slices.Contains(m.options, c) && !taken[c] {
				has = append(has, c)
			}
		}
		if len(has) == 0 {
			continue
		}
		ownDir := filepath.Join(m.point, below(m.root, own[has[0]]))
		base := firstWritable(m.point, ownDir)
		if base == "" {
			continue
		}
		for _, c := range has {
			taken[c] = true
		}
		found = append(found, hierarchy{base: base, own: ownDir, controllers: has})
	}
	return found
}

func detectV2(mounts []mount, own map[string]string) *hierarchy {
	for _, m := range mounts {
		if m.fstype != "cgroup2" {
			continue
		}
		ownDir := filepath.Join(m.point, below(m.root, own[""]))
		base := delegated(m.point, ownDir)
		if base == "" {
			base = firstWritable(m.point, ownDir)
		}
		if base == "" {
			continue
		}
		var has []string
		text, err := os.ReadFile(filepath.Join(base, "cgroup.controllers"))
		if err != nil {
			continue
		}
		for c := range strings.FieldsSeq(string(text)) {
			if slices.Contains(limiting, c) {
				has = append(has, c)
			}
		}
		return &hierarchy{base: base, own: ownDir, controllers: has}
	}
	return nil
}

// delegated finds the directory that systemd handed to our service (Delegate=yes): it marks it with an
// extended attribute. With DelegateSubgroup= this process is in a child of it, hence the walk upwards.
func delegated(top, own string) string {
	for dir := own; strings.HasPrefix(dir, top) && dir != top; dir = filepath.Dir(dir) {
		for _, name := range []string{"trusted.delegate", "user.delegate"} {
			value := make([]byte, 8)
			n, err := unix.Getxattr(dir, name, value)
			if err == nil && string(value[:n]) == "1" && writable(dir) {
				return dir
			}
		}
	}
	return ""
}

func firstWritable(dirs ...string) string {
	for _, dir := range dirs {
		if writable(dir) {
			return dir
		}
	}
	return ""
}

// writable asks with the effective ids, and also says no to a read-only mount.
func writable(dir string) bool {
	return unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS) == nil
}

type mount struct {
	root, point, fstype string
	options             []string
}

// parseMounts reads lines of /proc/self/mountinfo; see proc_pid_mountinfo(5) for the fields.
func parseMounts(lines []string) []mount {
	var mounts []mount
	for _, line := range lines {
		before, after, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 6 || len(g) < 3 {
			continue
		}
		mounts = append(mounts, mount{
			root: unescape(f[3]), point: unescape(f[4]), fstype: g[0], options: strings.Split(g[2], ","),
		})
	}
	return mounts
}

// parseMembership reads lines of /proc/self/cgroup into controller -> path; v2 has the empty name.
func parseMembership(lines []string) map[string]string {
	own := map[string]string{}
	for _, line := range lines {
		f := strings.SplitN(line, ":", 3)
		if len(f) != 3 {
			continue
		}
		for name := range strings.SplitSeq(f[1], ",") {
			own[name] = f[2]
		}
	}
	return own
}

// below turns a path as /proc/self/cgroup shows it into one relative to a mount of the subtree root.
func below(root, path string) string {
	if root == "/" {
		return path
	}
	rel, err := filepath.Rel(root, path)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		return "/"
	}
	return rel
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

func readLines(path string) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var lines []string
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		lines = append(lines, sc.Text())
	}
	return lines, sc.Err()
}

func containsAll(have, want []string) bool {
	for _, w := range want {
		if !slices.Contains(have, w) {
			return false
		}
	}
	return true
}

func containsAny(have, want []string) bool {
	return slices.ContainsFunc(want, func(w string) bool { return slices.Contains(have, w) })
}

// write puts a value into a control file. os.WriteFile would add O_CREAT and O_TRUNC and turn a missing
// file into a confusing "permission denied".
func write(dir, file, value string) error {
	path := filepath.Join(dir, file)
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		_, err = unix.Write(fd, []byte(value))
		unix.Close(fd)
	}
	if err != nil {
		return &os.PathError{Op: "write " + value + " to", Path: path, Err: err}
	}
	return nil
}

func missing(err error) bool { return errors.Is(err, os.ErrNotExist) }
