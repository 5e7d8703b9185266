// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"errors"
	"os"
	"path/filepath"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/launch"
	"opensandbox.io/node/record"
	"opensandbox.io/node/wipe"
	"opensandbox.io/node/wire"
)

// adopt takes up what a predecessor left: sandboxes that live, ends nobody has heard of, removals that were
// interrupted. What has no record was never answered for and goes.
func (d *Daemon) adopt() error {
	records, err := d.records.Load()
	if err != nil {
		// A power failure leaves such files; they are swept with everything else that has no record.
		d.log.Error("unreadable records", "error", err)
	}
	var ended []*sandbox
	keep := map[string]bool{}
	for _, r := range records {
		s := newSandbox(*r)
		close(s.made)
		d.sandboxes[r.ID] = s
		if r.BootID == d.bootID && d.find(s) {
			keep[launch.SlotName(r.Slot)] = true
		}
		if s.process == nil {
			ended = append(ended, s)
		}
	}
	if err := cgroup.Sweep(d.cgroups, d.tree, keep); err != nil {
		d.log.Error("left behind", "what", "control groups", "error", err)
	}
	for _, s := range ended {
		d.settle(s)
	}
	d.sweep()
	return nil
}

// find looks for what a record of this run of the kernel names, and says whether its control group is still wanted.
func (d *Daemon) find(s *sandbox) (wanted bool) {
	if s.record.Phase == record.Ended {
		return false
	}
	process, err := launch.FindProcess(s.record.PID, s.record.StartTime)
	if s.record.Phase == record.Deleting {
		if err == nil {
			process.Kill()
			process.Wait()
			process.Close()
		}
		return false
	}
	s.group, _ = cgroup.Open(d.cgroups, s.record.CgroupTree, launch.SlotName(s.record.Slot))
	if err == nil {
		d.takeUp(s, process)
	}
	// Where the process is gone, its counters may still say why.
	return true
}

// takeUp makes a living sandbox ours.
func (d *Daemon) takeUp(s *sandbox, process *launch.Process) {
	s.state = wire.ReportStateRunning
	s.process = process
	s.block = d.blocks.Adopt(s.record.Slot, process)
	// The instance's group may be another one than last time.
	dir := filepath.Join(d.runDir, s.record.ID)
	for _, path := range []string{dir, filepath.Join(dir, "api"), filepath.Join(dir, "ports")} {
		if err := os.Chown(path, -1, d.group); err != nil {
			d.log.Error("socket of an adopted sandbox", "sandbox", s.record.ID, "error", err)
		}
	}
	d.log.Info("adopted", "sandbox", s.record.ID, "pid", process.PID)
	go d.awaitEnd(s)
}

// settle finishes what a record says was under way with a sandbox whose process is gone.
func (d *Daemon) settle(s *sandbox) {
	switch s.record.Phase {
	case record.Deleting:
		d.giveBack(s)
		close(s.ended)
		d.wipe(s)
	case record.Ended:
		d.giveBack(s)
		if _, err := os.Stat(filepath.Join(d.spools, s.record.ID)); err == nil {
			if err := d.keepOutput(s.record.ID); err != nil {
				d.log.Warn("output of the entry point is lost", "sandbox", s.record.ID, "error", err)
			}
		}
		s.state = wire.ReportStateEnded
		close(s.ended)
	default:
		s.state = wire.ReportStateRunning
		d.finish(s)
	}
}

// sweep removes directories and files without a record.
func (d *Daemon) sweep() {
	known := func(id string) bool { return d.sandboxes[id] != nil }
	err := d.records.Sweep(known)
	for _, dir := range []string{d.files, d.spools, d.runDir} {
		entries, failed := os.ReadDir(dir)
		err = errors.Join(err, failed)
		for _, entry := range entries {
			if isUUID(entry.Name()) && !known(entry.Name()) {
				err = errors.Join(err, d.trash.take(filepath.Join(dir, entry.Name())))
			}
		}
	}
	images, failed := os.ReadDir(d.images)
	err = errors.Join(err, failed)
	used := map[string]bool{d.image.digest: true}
	for _, s := range d.sandboxes {
		used[s.record.ImageDigest] = true
	}
	for _, entry := range images {
		if !used[entry.Name()] {
			err = errors.Join(err, wipe.Tree(filepath.Join(d.images, entry.Name())))
		}
	}
	d.blocks.Sweep()
	if err != nil {
		d.log.Error("left behind", "error", err)
	}
}
