// SPDX-License-Identifier: Apache-2.0

package spawn

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// A process that forks twice and starts a session of its own shares neither parent nor group nor session with the
// command it came out of. What it cannot shed by that are resource limits: a child has its parent's. So each process
// that is started gets a value of its own for one that nobody uses, the real-time limit (RLIMIT_RTTIME, in
// microseconds; the values are beyond a hundred thousand years), and all that comes out of it has that value.
//
// A limit belongs to the whole process, so execd sets its own before it forks, and the child is born with it: there is
// no moment at which it could fork without. Limits may only go down without privilege, so the marks do.
//
// A program that lowers this limit on purpose gets away from its command. It does not get out of the sandbox.

// markStep leaves room between two marks of ours for those of a daemon that runs within one of our processes and
// starts from its own mark: it is off by a random part of a step.
const markStep = 1 << 32

var marks struct {
	mu   sync.Mutex
	next uint64 // 0: not begun
	used bool   // false: this process cannot mark
}

// nextMark sets this process's limit to a value nobody else has; 0 where that cannot be done. Whoever forks next has
// it, so forks must not happen at the same time.
func nextMark() uint64 {
	marks.mu.Lock()
	defer marks.mu.Unlock()
	if marks.next == 0 {
		var now unix.Rlimit
		var random [4]byte
		_, _ = rand.Read(random[:]) // never fails
		if unix.Getrlimit(unix.RLIMIT_RTTIME, &now) == nil {
			marks.next = min(now.Max, 1<<62) - 1 - uint64(binary.LittleEndian.Uint32(random[:]))%(markStep/2)
			marks.used = now.Max > 1<<61 // else somebody else has a use for it
		} else {
			marks.next = 1
		}
	}
	if !marks.used || marks.next < 1<<40 {
		return 0
	}
	marks.next -= markStep
	if unix.Setrlimit(unix.RLIMIT_RTTIME, &unix.Rlimit{Cur: marks.next, Max: marks.next}) != nil {
		marks.used = false
		return 0
	}
	return marks.next
}

// markOf reads the mark of a process; 0 when it cannot be told.
func markOf(pid int) uint64 {
	var limit unix.Rlimit
	if unix.Prlimit(pid, unix.RLIMIT_RTTIME, nil, &limit) == nil {
		return limit.Max
	}
	// That is refused for processes of other users; this file is open to all.
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/limits")
	if err != nil {
		return 0
	}
	return writtenMark(text)
}

// writtenMark finds the mark in what /proc/PID/limits says.
func writtenMark(text []byte) uint64 {
	_, line, _ := bytes.Cut(text, []byte("Max realtime timeout"))
	line, _, _ = bytes.Cut(line, []byte("\n"))
	fields := bytes.Fields(line)
	if len(fields) < 2 {
		return 0
	}
	mark, _ := strconv.ParseUint(string(fields[1]), 10, 64)
	return mark
}
