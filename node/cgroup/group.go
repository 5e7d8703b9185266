// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	execdLeaf   = "execd"
	payloadLeaf = "payload"

	// period of the cpu quota, the kernel's default.
	cpuPeriod = 100_000
	// patience bounds every wait for the kernel: freezing, dying, rmdir.
	patience = 5 * time.Second
)

// execdLimits keep a bug in our daemon, or output that floods it, from eating the host. Its cpu is apart from the
// payload's, and more: it must answer while the payload uses all of its own.
func execdLimits(payload Limits) Limits {
	own := Limits{MemoryBytes: 256 << 20, Pids: 512}
	if payload.CPUMillis > 0 {
		own.CPUMillis = max(2*payload.CPUMillis, 500)
	}
	return own
}

// Limits of a payload; 0 means unlimited.
type Limits struct{ CPUMillis, MemoryBytes, Pids int64 }

// Group is one slot's directories.
type Group struct {
	host *Host
	slot string
	dirs []string // the slot's directory per hierarchy of the host
	// limits are those in force; zero for a group that was opened, not created.
	limits Limits

	// mu keeps Kill from meeting a launcher thread that stands in the slot (v1).
	mu sync.Mutex
}

// Create makes the slot with its leaves and limits. A limit that this host cannot enforce is a
// *MissingController; nothing is left behind on error. A slot that exists already is an error:
// sweep first.
func (h *Host) Create(tree, slot string, l Limits) (*Group, error) {
	g, err := Open(h, tree, slot)
	if err != nil {
		return nil, err
	}
	for controller, value := range map[string]int64{"cpu": l.CPUMillis, "memory": l.MemoryBytes, "pids": l.Pids} {
		if value > 0 && !h.Has(controller) {
			return nil, &MissingController{controller, h.version}
		}
	}
	if err := h.Prepare(tree); err != nil {
		return nil, err
	}
	for i, dir := range g.dirs {
		if err := os.Mkdir(dir, 0o755); err != nil {
			g.dirs = g.dirs[:i] // what follows is not ours to remove
			return nil, errors.Join(err, g.Remove())
		}
	}
	if err := g.furnish(l); err != nil {
		return nil, errors.Join(err, g.Remove())
	}
	g.limits = l
	return g, nil
}

// Limit changes the limits of a group that was created with others, before anything runs in its payload. A limit of 0
// stays as it is.
func (g *Group) Limit(l Limits) error {
	before, after := g.leafLimits(g.limits), g.leafLimits(l)
	for i, y := range g.host.hiers {
		if !y.leaves() {
			continue
		}
		for n, leaf := range leaves {
			changed := after[n].without(before[n])
			dir := filepath.Join(g.dirs[i], leaf)
			if err := raiseSwap(dir, g.host.version, y.controllers, changed, before[n]); err != nil {
				return err
			}
			if err := limit(dir, g.host.version, y.controllers, changed); err != nil {
				return err
			}
		}
	}
	g.limits = l
	return nil
}

// leaves of a slot, and leafLimits what each of them may use.
var leaves = [...]string{execdLeaf, payloadLeaf}

func (g *Group) leafLimits(l Limits) [len(leaves)]Limits { return [...]Limits{execdLimits(l), l} }

// without leaves out what is equal in other.
func (l Limits) without(other Limits) Limits {
	if l.CPUMillis == other.CPUMillis {
		l.CPUMillis = 0
	}
	if l.MemoryBytes == other.MemoryBytes {
		l.MemoryBytes = 0
	}
	if l.Pids == other.Pids {
		l.Pids = 0
	}
	return l
}

// raiseSwap makes room for a higher limit of memory on v1, where the limit of memory and swap together, which never
// is the lower one, has to go first.
func raiseSwap(dir, version string, controllers []string, l, before Limits) error {
	if version != V1 || !slices.Contains(controllers, "memory") || before.MemoryBytes == 0 || l.MemoryBytes <= before.MemoryBytes {
		return nil
	}
	if err := write(dir, "memory.memsw.limit_in_bytes", strconv.FormatInt(l.MemoryBytes, 10)); !missing(err) {
		return err
	}
	return nil
}

// Open names a slot that exists already, for adoption and removal. It does not look at the disk.
func Open(h *Host, tree, slot string) (*Group, error) {
	for _, name := range []string{tree, slot} {
		if name == "" || strings.HasPrefix(name, ".") || strings.ContainsAny(name, "/\x00") || name == supervisorLeaf {
			return nil, fmt.Errorf("cgroup: %q cannot name a group", name)
		}
	}
	g := &Group{host: h, slot: slot}
	for _, y := range h.hiers {
		g.dirs = append(g.dirs, filepath.Join(y.base, tree, slot))
	}
	return g, nil
}

func (g *Group) furnish(l Limits) error {
	for i, y := range g.host.hiers {
		if err := inheritCPUSet(g.dirs[i]); err != nil {
			return err
		}
		if g.host.version == V2 {
			if err := enable(g.dirs[i], y.controllers); err != nil {
				return err
			}
		}
		if !y.leaves() {
			continue
		}
		for n, limits := range g.leafLimits(l) {
			dir := filepath.Join(g.dirs[i], leaves[n])
			if err := os.Mkdir(dir, 0o755); err != nil {
				return err
			}
			if err := inheritCPUSet(dir); err != nil {
				return err
			}
			if err := limit(dir, g.host.version, y.controllers, limits); err != nil {
				return err
			}
		}
	}
	return nil
}

// inheritCPUSet copies the parent's cpus and memory nodes: on v1 a fresh cpuset is empty and takes no
// task. Matters only where cpuset shares a hierarchy with a controller we use.
func inheritCPUSet(dir string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if missing(err) {
			return nil
		}
		if err != nil || strings.TrimSpace(string(text)) != "" {
			return err
		}
		if text, err = os.ReadFile(filepath.Join(filepath.Dir(dir), file)); err != nil {
			return err
		}
		if err := write(dir, file, strings.TrimSpace(string(text))); err != nil {
			return err
		}
	}
	return nil
}

func limit(dir, version string, controllers []string, l Limits) error {
	if slices.Contains(controllers, "cpu") && l.CPUMillis > 0 {
		// The kernel refuses quotas below 1 ms.
		quota := max(l.CPUMillis*cpuPeriod/1000, 1000)
		if version == V2 {
			if err := write(dir, "cpu.max", fmt.Sprintf("%d %d", quota, cpuPeriod)); err != nil {
				return err
			}
		} else {
			if err := write(dir, "cpu.cfs_period_us", strconv.Itoa(cpuPeriod)); err != nil {
				return err
			}
			if err := write(dir, "cpu.cfs_quota_us", strconv.FormatInt(quota, 10)); err != nil {
				return err
			}
		}
	}
	if slices.Contains(controllers, "memory") && l.MemoryBytes > 0 {
		if err := limitMemory(dir, version, strconv.FormatInt(l.MemoryBytes, 10)); err != nil {
			return err
		}
	}
	if slices.Contains(controllers, "pids") && l.Pids > 0 {
		return write(dir, "pids.max", strconv.FormatInt(l.Pids, 10))
	}
	return nil
}

// limitMemory also takes swap away: a sandbox that swaps spends the host's disk instead of its memory.
// Kernels without swap accounting lack the second file; v1 then gets swappiness 0 as the next best.
func limitMemory(dir, version, bytes string) error {
	if version == V2 {
		if err := write(dir, "memory.max", bytes); err != nil {
			return err
		}
		if err := write(dir, "memory.swap.max", "0"); !missing(err) {
			return err
		}
		return nil
	}
	// Order matters: memsw may never be below the plain limit.
	if err := write(dir, "memory.limit_in_bytes", bytes); err != nil {
		return err
	}
	err := write(dir, "memory.memsw.limit_in_bytes", bytes)
	if missing(err) {
		err = write(dir, "memory.swappiness", "0")
	}
	if err != nil {
		return err
	}
	// v1 counts buffers of network sockets apart (v2 counts them as memory); without a limit of their own they
	// have none. Some kernels are built without it.
	if err := write(dir, "memory.kmem.tcp.limit_in_bytes", bytes); !missing(err) {
		return err
	}
	return nil
}

// Yield makes the slot give way to everybody else who wants a processor, until Insist. Both do nothing where the host
// has no cpu controller.
func (g *Group) Yield() error { return g.weigh(10) }

// Insist gives the slot its usual weight.
func (g *Group) Insist() error { return g.weigh(100) }

func (g *Group) weigh(percent int) error {
	i, ok := g.host.holding("cpu")
	switch {
	case !ok:
		return nil
	case g.host.version == V2:
		return write(g.dirs[i], "cpu.weight", strconv.Itoa(percent))
	}
	return write(g.dirs[i], "cpu.shares", strconv.Itoa(1024*percent/100))
}

// Delegate lets the sandbox's root (its uid on the host) clone processes from execd into payload on v2:
// the kernel asks for write permission on the target's cgroup.procs and on that of the common ancestor.
// The execd leaf stays ours, so nothing can move itself there. v1 needs nothing: the fds of an Entry
// carry the right of the root that opened them.
func (g *Group) Delegate(uid int) error {
	if g.host.version != V2 {
		return nil
	}
	for _, dir := range []string{g.dirs[0], filepath.Join(g.dirs[0], payloadLeaf)} {
		if err := os.Chown(filepath.Join(dir, "cgroup.procs"), uid, -1); err != nil {
			return err
		}
	}
	return nil
}

// Freeze stops every process of the slot and waits until all of them stand still.
func (g *Group) Freeze() error { return g.freeze(true) }

// Thaw lets them run on.
func (g *Group) Thaw() error { return g.freeze(false) }

func (g *Group) freeze(on bool) error {
	switch {
	case g.host.version == V2:
		value := map[bool]string{true: "1", false: "0"}[on]
		if err := write(g.dirs[0], "cgroup.freeze", value); err != nil {
			return err
		}
		return await("the freezer", func() (bool, error) {
			text, err := os.ReadFile(filepath.Join(g.dirs[0], "cgroup.events"))
			return fieldOf(string(text), "frozen") == map[bool]int64{true: 1, false: 0}[on], err
		})
	case g.host.Has("freezer"):
		i, _ := g.host.holding("freezer")
		state := map[bool]string{true: "FROZEN", false: "THAWED"}[on]
		if err := write(g.dirs[i], "freezer.state", state); err != nil {
			return err
		}
		return await("the freezer", func() (bool, error) {
			text, err := os.ReadFile(filepath.Join(g.dirs[i], "freezer.state"))
			return strings.TrimSpace(string(text)) == state, err
		})
	}
	return &MissingController{"freezer", g.host.version}
}

// Kill ends every process of the slot, frozen or not, and returns when none is left.
func (g *Group) Kill() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.dirs) == 0 {
		return nil
	}
	if g.host.version == V2 {
		err := write(g.dirs[0], "cgroup.kill", "1")
		if err == nil {
			return await("the end of all processes", func() (bool, error) {
				text, err := os.ReadFile(filepath.Join(g.dirs[0], "cgroup.events"))
				return missing(err) || fieldOf(string(text), "populated") == 0, ignoreMissing(err)
			})
		}
		if _, gone := os.Stat(g.dirs[0]); missing(gone) {
			return nil
		}
		if !missing(err) { // Linux before 5.14 has no cgroup.kill: signal one by one
			return err
		}
	}
	return await("the end of all processes", func() (bool, error) {
		// Frozen, nothing forks away between the listing and the signal. A freezer that does not
		// settle is no reason to let them live.
		frozen := g.freeze(true) == nil
		pids, err := g.processes()
		for _, pid := range pids {
			if kerr := unix.Kill(pid, unix.SIGKILL); kerr != nil && kerr != unix.ESRCH {
				err = errors.Join(err, kerr)
			}
		}
		// On v1 the frozen die only when thawed.
		if frozen {
			err = errors.Join(err, ignoreMissing(g.freeze(false)))
		}
		return len(pids) == 0, err
	})
}

// processes lists the slot's processes without our own: on v1 a launcher whose thread stands in the
// slot would be listed too. All hierarchies are asked, since v1 keeps them apart.
func (g *Group) processes() ([]int, error) {
	self := os.Getpid()
	var pids []int
	for _, dir := range g.dirs {
		for _, leaf := range []string{"", execdLeaf, payloadLeaf} {
			lines, err := readLines(filepath.Join(dir, leaf, "cgroup.procs"))
			if ignoreMissing(err) != nil {
				return nil, err
			}
			for _, line := range lines {
				// 0 is a process of a foreign pid namespace: not ours to see, and kill(0) would be us. 1 is
				// this machine's init, never a sandbox's process, whoever moved it here.
				pid, err := strconv.Atoi(line)
				if err == nil && pid > 1 && pid != self && !slices.Contains(pids, pid) {
					pids = append(pids, pid)
				}
			}
		}
	}
	return pids, nil
}

// Remove deletes the slot's directories. A group stays busy for a moment after its last process was
// reaped, so EBUSY is retried; what is already gone is fine.
func (g *Group) Remove() error {
	return g.remove(time.Now().Add(patience))
}

func (g *Group) remove(deadline time.Time) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var errs []error
	for _, dir := range g.dirs {
		for _, sub := range []string{execdLeaf, payloadLeaf, "."} {
			if err := rmdir(filepath.Join(dir, sub), deadline); err != nil {
				errs = append(errs, err)
				break
			}
		}
	}
	return errors.Join(errs...)
}

func rmdir(dir string, deadline time.Time) error {
	return awaitUntil(deadline, "rmdir "+dir, func() (bool, error) {
		switch err := unix.Rmdir(dir); err {
		case nil, unix.ENOENT, unix.ENODEV:
			return true, nil
		case unix.EBUSY:
			// Groups that someone made below a leaf keep it busy for ever.
			return false, removeBelow(dir, deadline)
		default:
			return false, &os.PathError{Op: "rmdir", Path: dir, Err: err}
		}
	})
}

func removeBelow(dir string, deadline time.Time) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ignoreMissing(err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if err := rmdir(filepath.Join(dir, e.Name()), deadline); err != nil {
			return err
		}
	}
	return nil
}

// Sweep kills and removes every slot of the tree that is not kept: what a killed launcher left behind.
// With nothing to keep the tree goes as well, unless it holds this process.
func Sweep(h *Host, tree string, keep map[string]bool) error {
	var errs []error
	swept := map[string]bool{}
	for _, y := range h.hiers {
		entries, err := os.ReadDir(filepath.Join(y.base, tree))
		if err != nil {
			errs = append(errs, ignoreMissing(err))
			continue
		}
		for _, e := range entries {
			slot := e.Name()
			if !e.IsDir() || keep[slot] || swept[slot] || slot == supervisorLeaf {
				continue
			}
			swept[slot] = true
			g, err := Open(h, tree, slot)
			if err == nil {
				err = errors.Join(g.Kill(), g.Remove())
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// await polls with growing pauses: the kernel offers no event for most of what is waited for here.
func await(what string, done func() (bool, error)) error {
	return awaitUntil(time.Now().Add(patience), what, done)
}

func awaitUntil(deadline time.Time, what string, done func() (bool, error)) error {
	for pause := 50 * time.Microsecond; ; pause = min(pause*2, 5*time.Millisecond) {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("cgroup: waited too long for %s", what)
		}
		time.Sleep(pause)
	}
}

func ignoreMissing(err error) error {
	if missing(err) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// fieldOf reads one number of a "name value" file; -1 if absent.
func fieldOf(text, name string) int64 {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 2 && f[0] == name {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				return n
			}
		}
	}
	return -1
}
