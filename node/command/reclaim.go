// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"time"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

const leftoverKilled = "What it left behind filled the sandbox with processes and was killed."

// measure reads the meter; ok is false where nothing counts.
func (r *Runner) measure() (u cgroup.Usage, ok bool) {
	if r.Meter == nil {
		return cgroup.Usage{}, false
	}
	u, err := r.Meter.Read()
	return u, err == nil
}

// full is true when there is no room for an ordinary command, a pipeline say. The leader of a bomb and those of its
// processes that gave up leave a few places free at any moment, and the next command would get stuck with those.
func full(u cgroup.Usage) bool {
	return u.PidsLimit > 0 && u.PidsLimit-u.Pids < max(4, u.PidsLimit/8)
}

const (
	// settle is how long those that are already on their way out get to leave.
	settle = 300 * time.Millisecond
	// retry is how long a bomb may lie still: shells wait for a second before they fork again.
	retry = 1500 * time.Millisecond
)

// staysFull tells a bomb from a crowd that leaves together with its command: forks are still refused, or nobody goes.
func (r *Runner) staysFull(first cgroup.Usage) bool {
	last := first
	for began := time.Now(); ; {
		waited := time.Since(began)
		switch {
		case last.PidsRefused > first.PidsRefused:
			return true
		case last.Pids <= last.PidsLimit/2, waited > retry:
			return false
		case waited > settle && full(last):
			return true
		}
		time.Sleep(5 * time.Millisecond) // the kernel counts, and tells nobody
		var ok bool
		if last, ok = r.measure(); !ok {
			return false
		}
	}
}

// crowded completes the end of a command during which forks were refused: it says so, and where the sandbox is
// still full or still refuses, it ends the fork bomb now, before the next command has to fight it for a place. What
// a command left behind on purpose has nothing to fear while there is room. last was measured after the command's end.
func (r *Runner) crowded(c *Command, end *wire.CommandEnd, last cgroup.Usage) {
	limit := "its limit of processes"
	if last.PidsLimit > 0 {
		limit = fmt.Sprintf("its limit of %d processes", last.PidsLimit)
	}
	note(end, "The sandbox reached "+limit+" while it ran.")
	if !r.staysFull(last) {
		return
	}
	bomb := r.reclaim(c)
	if bomb == c {
		note(end, leftoverKilled)
	}
	if bomb == nil && cause(c.why.Load()) == nobody {
		return // running commands fill it, and those are not ours to end
	}
	// The killed count until they are reaped, and nobody tells when that is.
	for try := 0; full(last) && try < 100; try++ {
		time.Sleep(10 * time.Millisecond)
		var ok bool
		if last, ok = r.measure(); !ok {
			return
		}
	}
}

// reclaim makes room when the sandbox is at its limit of processes and most of them are what one finished command
// has left behind: a fork bomb, which nobody could end any more because its command has ended. It gives the command,
// or nil when there is none. The record of the one that is just ending, if any, is left to the caller.
func (r *Runner) reclaim(ending *Command) *Command {
	sessions, total := spawn.Sessions(), 0
	for _, n := range sessions {
		total += n
	}
	if u, ok := r.measure(); ok && u.Pids > 0 { // without a pid namespace of our own, /proc also shows others
		total = int(u.Pids)
	}
	r.mu.Lock()
	var bomb *Command
	running := map[int]bool{}
	pid := 0
	for _, c := range r.order {
		own := c.Pid()
		if own == 0 {
			continue
		}
		if c != ending && !c.ended() {
			running[own] = true
		} else if bomb == nil || sessions[own] >= sessions[pid] {
			bomb, pid = c, own
		}
	}
	r.mu.Unlock()
	// A pid that came round again belongs to the younger command.
	if bomb == nil || running[pid] || sessions[pid] <= total/2 {
		return nil
	}
	r.Log.Warn("killing what a finished command left: it fills the sandbox", "command", bomb.rec.ID, "processes", sessions[pid])
	tree := bomb.process().Tree()
	defer tree.Close()
	tree.Kill()
	if bomb == ending {
		return bomb
	}
	bomb.mu.Lock()
	if bomb.rec.End != nil {
		end := *bomb.rec.End
		note(&end, leftoverKilled)
		bomb.rec.End = &end
	}
	rec := bomb.rec
	bomb.mu.Unlock()
	r.journal.write(&rec)
	return bomb
}
