// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"opensandbox.io/node/launch"
	"opensandbox.io/node/thread"
)

const (
	// maxShells bounds the pool, however much is asked for; shellMemory is about what one of them takes, and
	// memoryShare the part of the free memory that all of them may.
	maxShells   = 64
	shellMemory = 2 << 20
	memoryShare = 32
	// memorySpan is for how many seconds the pool remembers how many creates there were.
	memorySpan = 10
	// courtesy is for how long after a create the pool leaves the processors to whoever has just got a sandbox and is
	// about to use it; while fewer than few shells wait, the next create counts for more, and it is haste.
	courtesy = 30 * time.Millisecond
	haste    = 2 * time.Millisecond
	few      = 4
	// patient is how long each step of making a shell gives way to others before it goes on in spite of them.
	patient = 100 * time.Millisecond
	// look is how often the pool looks after its shells when nothing happens, and how long it waits after a failure.
	look = 5 * time.Second
)

// pool keeps shells ready, so that a create need not wait for their making. They are made when no create is under
// way, nor a delete: in a burst they would only take its processors. How many depends on how many were asked for lately. Each is
// used once. None is a sandbox: nobody asked for it, it has no record, and it dies with sandboxd.
type pool struct {
	produce func(giveWay func()) (*launch.Shell, *launch.Base, error)
	rest    int // how many wait when nobody asks
	log     *slog.Logger

	mu       sync.Mutex
	waiting  []waitingShell // oldest first
	requests int            // creates and deletes under way
	created  time.Time      // when the last create ended
	asked    [memorySpan]int
	askedAt  int64 // the second that the last entry of asked stands for
	failures int

	wake   chan struct{}
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{}
	// closing counts the shells that are being given up.
	closing sync.WaitGroup
}

type waitingShell struct {
	*launch.Shell
	// base is what it was made of: when that is no longer what sandboxes are made of, it is of no use.
	base *launch.Base
}

func openPool(rest int, produce func(giveWay func()) (*launch.Shell, *launch.Base, error), log *slog.Logger) *pool {
	ctx, cancel := context.WithCancel(context.Background())
	p := &pool{
		produce: produce, rest: rest, log: log,
		wake: make(chan struct{}, 1), ctx: ctx, cancel: cancel, done: make(chan struct{}),
	}
	go p.run()
	return p
}

// begin marks a create or delete; what it returns, its end.
func (p *pool) begin(create bool) (end func()) {
	p.mu.Lock()
	p.requests++
	p.mu.Unlock()
	return func() {
		p.mu.Lock()
		p.requests--
		if create {
			p.created = time.Now()
		}
		p.mu.Unlock()
		p.poke()
	}
}

// giveWay waits while others are more important.
func (p *pool) giveWay() {
	enough := time.NewTimer(patient)
	defer enough.Stop()
	for wait := p.wait(time.Now()); wait > 0; wait = p.wait(time.Now()) {
		again := time.NewTimer(wait)
		select {
		case <-p.wake:
		case <-again.C:
		case <-enough.C:
			again.Stop()
			return
		case <-p.ctx.Done():
			again.Stop()
			return
		}
		again.Stop()
	}
}

// wait is how long others are more important for certain.
func (p *pool) wait(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.requests > 0 {
		return look // the end of the request wakes us
	}
	pause := courtesy
	if len(p.waiting) < few {
		pause = haste
	}
	return pause - now.Sub(p.created)
}

func (p *pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// size is how many shells wait.
func (p *pool) size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.waiting)
}

// take gives a living shell of that base, or nil.
func (p *pool) take(base *launch.Base) *launch.Shell {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count(time.Now())
	// The youngest first: its memory is still where the processor finds it fast.
	for n := len(p.waiting) - 1; n >= 0; n-- {
		shell := p.waiting[n]
		if shell.base.Profile != base.Profile {
			continue
		}
		p.waiting = append(p.waiting[:n], p.waiting[n+1:]...)
		if shell.base == base && shell.Alive() {
			return shell.Shell
		}
		p.discard(shell)
	}
	return nil
}

// count notes that a create asked. The lock is held.
func (p *pool) count(now time.Time) {
	p.age(now)
	p.asked[memorySpan-1]++
}

// age moves the seconds that have passed out of what is remembered.
func (p *pool) age(now time.Time) {
	passed := min(now.Unix()-p.askedAt, memorySpan)
	if passed <= 0 {
		return
	}
	copy(p.asked[:], p.asked[passed:])
	clear(p.asked[memorySpan-passed:])
	p.askedAt = now.Unix()
}

// wanted is how many shells should wait: half of what was asked for lately, and never less than at rest.
func (p *pool) wanted(now time.Time) int {
	if p.rest == 0 {
		return 0
	}
	p.age(now)
	sum := 0
	for _, n := range p.asked {
		sum += n
	}
	return min(max(p.rest, sum/2), maxShells, memoryForShells())
}

// memoryForShells is how many shells this machine has memory for.
func memoryForShells() int {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return maxShells
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var kilobytes int
		if rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			if _, err := fmt.Sscan(rest, &kilobytes); err == nil {
				return kilobytes / memoryShare / (shellMemory >> 10)
			}
		}
	}
	return maxShells
}

// run keeps the pool as full as it should be.
func (p *pool) run() {
	defer close(p.done)
	thread.Background()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-p.wake:
		case <-p.ctx.Done():
			return
		}
		timer.Reset(p.tend())
	}
}

// tend does one thing the pool needs and says when to come again.
func (p *pool) tend() time.Duration {
	p.mu.Lock()
	p.dropDead()
	now := time.Now()
	wanted, have := p.wanted(now), len(p.waiting)
	for range (have - wanted + 1) / 2 { // half of what is too much: it may be wanted again soon
		p.discard(p.waiting[0])
		p.waiting = p.waiting[1:]
	}
	p.mu.Unlock()
	switch {
	case have > wanted, have == wanted && wanted > p.rest:
		return time.Second
	case have == wanted:
		return look
	}
	if wait := p.wait(now); wait > 0 {
		return wait
	}
	return p.fill()
}

// dropDead gives up shells whose process is gone.
func (p *pool) dropDead() {
	kept := p.waiting[:0]
	for _, shell := range p.waiting {
		if shell.Alive() {
			kept = append(kept, shell)
			continue
		}
		p.log.Warn("a shell has died waiting", "slot", shell.Slot())
		p.discard(shell)
	}
	clear(p.waiting[len(kept):])
	p.waiting = kept
}

// discard gives up a shell behind everybody's back.
func (p *pool) discard(shell waitingShell) { p.closing.Go(shell.Close) }

// fill makes one shell.
func (p *pool) fill() time.Duration {
	shell, base, err := p.produce(p.giveWay)
	if err == nil {
		if err = shell.Prepared(p.ctx); err != nil {
			shell.Close()
		}
	}
	if err != nil {
		// A create that meets the same error reports it; here it is news once.
		if p.failures++; p.failures == 1 && p.ctx.Err() == nil {
			p.log.Warn("no shell made ahead", "error", err)
		}
		return look
	}
	p.failures = 0
	p.mu.Lock()
	p.waiting = append(p.waiting, waitingShell{shell, base})
	p.mu.Unlock()
	return 0
}

// close ends every shell that waits.
func (p *pool) close() {
	p.cancel()
	<-p.done
	p.mu.Lock()
	for _, shell := range p.waiting {
		p.discard(shell)
	}
	p.waiting = nil
	p.mu.Unlock()
	p.closing.Wait()
}
