// SPDX-License-Identifier: Apache-2.0

package spawn

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Tree is the set of processes that came out of one command: its session, its group, and by parentage and mark (see
// nextMark) those that left both. It remembers whom it has seen, because parentage is lost when a process in between
// ends: scan before the first signal, not after it.
type Tree struct {
	leader  int
	mark    uint64 // 0: unknown, and a daemon whose parents ended before the first scan is not found
	members map[int]member
	grouped bool // somebody is in the leader's group, so that its number cannot belong to others
}

type member struct {
	start uint64 // clock ticks since boot; with the pid it names a process for good
	pidfd int    // -1 where the kernel gives none
}

// NewTree makes the tree of the process with that pid. Close it.
func NewTree(leader int) *Tree { return &Tree{leader: leader, members: map[int]member{}} }

// Tree makes the tree of the process. It also finds daemons that it left behind long ago. Close it.
func (p *Process) Tree() *Tree {
	t := NewTree(p.Pid)
	t.mark = p.mark
	return t
}

// Close forgets the processes.
func (t *Tree) Close() {
	for _, m := range t.members {
		if m.pidfd >= 0 {
			_ = unix.Close(m.pidfd)
		}
	}
	t.members = map[int]member{}
}

// Scan looks for members and gives the number of new ones.
func (t *Tree) Scan() int {
	table := processes()
	inside := map[int]bool{t.leader: true}
	for pid, m := range t.members {
		if p, ok := table[pid]; ok && p.start == m.start {
			inside[pid] = true
		}
	}
	t.grouped = false
	for pid, p := range table {
		if p.session == t.leader || p.group == t.leader {
			inside[pid] = true
			t.grouped = t.grouped || p.group == t.leader
		}
	}
	descend := func() {
		// Children of members, until nothing is added: the table has no order.
		for grew := true; grew; {
			grew = false
			for pid, p := range table {
				if !inside[pid] && inside[p.parent] {
					inside[pid], grew = true, true
				}
			}
		}
	}
	descend()
	self, fresh := os.Getpid(), 0
	if t.mark != 0 {
		for pid := range table {
			// execd itself has the mark of the youngest.
			if !inside[pid] && pid != self && markOf(pid) == t.mark {
				inside[pid] = true
			}
		}
		descend() // one that lowered its mark may still have a parent that did not
	}
	for pid := range inside {
		p, ok := table[pid]
		if !ok || pid == self || p.dead {
			continue
		}
		if m, known := t.members[pid]; known {
			if m.start == p.start {
				continue
			}
			_ = unix.Close(m.pidfd)
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			if err == unix.ESRCH {
				continue
			}
			fd = -1
		} else if now, ok := readStat(pid, nil); !ok || now.start != p.start {
			_ = unix.Close(fd)
			continue
		}
		t.members[pid] = member{p.start, fd}
		fresh++
	}
	return fresh
}

// Terminate asks every member to end. A stopped one is let go on, or it would never hear of it.
func (t *Tree) Terminate() {
	t.Scan()
	t.signal(unix.SIGTERM)
	t.signal(unix.SIGCONT)
}

// Kill ends every member. It stops all of them before it kills the first, so that one that forks as fast as it can
// does not outrun the scan, and the leader last, so that whoever waits for its end finds the others gone.
func (t *Tree) Kill() {
	t.stop()
	leader, found := t.members[t.leader]
	delete(t.members, t.leader)
	// Those in the middle of a disk access take a moment; it is not worth more than that.
	patience := time.Now().Add(time.Second)
	for {
		t.signal(unix.SIGKILL)
		if !t.WaitGone(patience) {
			break
		}
		fresh := t.Scan()
		if again, ok := t.members[t.leader]; ok {
			if again.pidfd >= 0 {
				_ = unix.Close(again.pidfd)
			}
			delete(t.members, t.leader)
			fresh--
		}
		if fresh <= 0 {
			break
		}
	}
	if found {
		t.members[t.leader] = leader
		t.signal(unix.SIGKILL)
	}
}

// stop stops every member, until no new one appears.
func (t *Tree) stop() {
	// A fork that was under way when the stop arrived may appear behind the back of the scan that follows: only two
	// quiet scans in a row are quiet. The bound is for the case that something keeps slipping in.
	for round, quiet := 0, 0; round < 64 && quiet < 2; round++ {
		if t.Scan() == 0 {
			quiet++
		} else {
			quiet = 0
		}
		if t.grouped {
			_ = unix.Kill(-t.leader, unix.SIGSTOP) // all at once: faster than any fork
		}
		t.signal(unix.SIGSTOP)
	}
}

// KillSince ends the members that came after a moment and leaves the leader and what is older alone, with all that
// came out of the older ones since.
func (t *Tree) KillSince(m Moment) {
	t.stop()
	spared := t.setAside(m)
	t.signal(unix.SIGKILL)
	t.WaitGone(time.Now().Add(time.Second))
	for pid, m := range spared {
		t.members[pid] = m
	}
	t.signal(unix.SIGCONT)
}

// InterruptSince is what Ctrl-C does in a terminal, to the members that came after a moment and to the leader.
func (t *Tree) InterruptSince(m Moment) {
	t.Scan()
	spared := t.setAside(m)
	if leader, ok := spared[t.leader]; ok {
		t.members[t.leader] = leader
	}
	t.signal(unix.SIGINT)
	for pid, m := range spared {
		t.members[pid] = m
	}
}

// setAside takes the leader and the members older than a moment out, with all that came out of the older ones since.
func (t *Tree) setAside(m Moment) map[int]member {
	table := processes()
	young := func(pid int) bool {
		for range len(table) {
			p, ok := table[pid]
			switch {
			case !ok || pid == t.leader || t.members[pid].start != p.start:
				return true // nobody older on the way up
			case p.start < m.ticks || m.children[pid]:
				return false
			}
			pid = p.parent
		}
		return true
	}
	spared := map[int]member{}
	for pid, m := range t.members {
		if pid == t.leader || !young(pid) {
			spared[pid] = m
		}
	}
	// Not earlier: whoever is looked at on the way up has to be there still.
	for pid := range spared {
		delete(t.members, pid)
	}
	return spared
}

// Moment divides the processes of a tree into older and younger ones.
type Moment struct {
	ticks    uint64       // as the kernel counts the start of a process, which is coarse
	children map[int]bool // of the leader, at that time
}

// Now is this moment for the tree of a leader.
func Now(leader int) Moment {
	m := Moment{children: map[int]bool{}}
	pid := strconv.Itoa(leader)
	// Where the kernel does not have it, what began in the same hundredth of a second counts as younger.
	list, _ := os.ReadFile("/proc/" + pid + "/task/" + pid + "/children")
	for field := range bytes.FieldsSeq(list) {
		if child, err := strconv.Atoi(string(field)); err == nil {
			m.children[child] = true
		}
	}
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) == nil {
		m.ticks = uint64(now.Nano()) / (uint64(time.Second) / userHZ)
	}
	return m
}

// userHZ is the unit of times in /proc, the same on every machine Linux has a Go for.
const userHZ = 100

func (t *Tree) signal(sig unix.Signal) {
	for pid, m := range t.members {
		if m.pidfd >= 0 {
			_ = unix.PidfdSendSignal(m.pidfd, sig, nil, 0)
			continue
		}
		if now, ok := readStat(pid, nil); ok && now.start == m.start {
			_ = unix.Kill(pid, sig)
		}
	}
}

// WaitGone waits until no member is left or the deadline has come, and says whether all are gone.
func (t *Tree) WaitGone(deadline time.Time) bool {
	for {
		var fds []unix.PollFd
		for _, m := range t.members {
			if m.pidfd >= 0 {
				fds = append(fds, unix.PollFd{Fd: int32(m.pidfd), Events: unix.POLLIN})
			}
		}
		if len(fds) == 0 {
			return true
		}
		left := time.Until(deadline)
		n, err := unix.Poll(fds, max(0, int(left.Milliseconds())))
		if err != nil && err != unix.EINTR {
			return false
		}
		for _, f := range fds {
			if n <= 0 || f.Revents == 0 {
				continue
			}
			for pid, m := range t.members {
				if int32(m.pidfd) == f.Fd {
					_ = unix.Close(m.pidfd)
					delete(t.members, pid)
				}
			}
		}
		if left <= 0 && n <= 0 {
			return false
		}
	}
}

// Sessions counts the processes of each session.
func Sessions() map[int]int {
	counts := map[int]int{}
	for _, p := range processes() {
		if !p.dead {
			counts[p.session]++
		}
	}
	return counts
}

type stat struct {
	parent, group, session int
	start                  uint64
	dead                   bool
}

// processes reads the process table from /proc.
func processes() map[int]stat {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	table := map[int]stat{}
	buf := make([]byte, 1024)
	for {
		names, err := dir.Readdirnames(512)
		for _, name := range names {
			if pid, err := strconv.Atoi(name); err == nil {
				if s, ok := readStat(pid, buf); ok {
					table[pid] = s
				}
			}
		}
		if err != nil {
			return table
		}
	}
}

func readStat(pid int, buf []byte) (stat, bool) {
	if buf == nil {
		buf = make([]byte, 1024)
	}
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return stat{}, false
	}
	n, err := unix.Read(fd, buf)
	_ = unix.Close(fd)
	if err != nil || n <= 0 {
		return stat{}, false
	}
	return parseStat(buf[:n])
}

// parseStat reads a line of /proc/PID/stat. The name is in parentheses and chosen by the program: it may itself
// hold parentheses and spaces, so fields count from the last one.
func parseStat(line []byte) (stat, bool) {
	i := bytes.LastIndexByte(line, ')')
	if i < 0 {
		return stat{}, false
	}
	f := bytes.Fields(line[i+1:]) // from field 3, the state
	if len(f) < 20 {
		return stat{}, false
	}
	num := func(i int) int { n, _ := strconv.Atoi(string(f[i])); return n }
	start, err := strconv.ParseUint(string(f[19]), 10, 64)
	if err != nil {
		return stat{}, false
	}
	return stat{parent: num(1), group: num(2), session: num(3), start: start, dead: f[0][0] == 'Z' || f[0][0] == 'X'}, true
}
