// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"opensandbox.io/node/wire"
)

// recheck bounds how long the wall clock may be believed: it can be set, and machines sleep.
const recheck = 30 * time.Second

// life is the one task that acts on time: deadlines nobody else enforces, and sandboxd's own leaving.
type life struct {
	pokes   chan struct{}
	leaving chan struct{}
	once    sync.Once
	// busy counts requests under way; touched is when the last one ended.
	busy    atomic.Int64
	touched atomic.Pointer[time.Time]
	// idle is since when there was nothing to do, zero while there is; it belongs to the loop.
	idle time.Time
}

func newLife() *life {
	return &life{pokes: make(chan struct{}, 1), leaving: make(chan struct{})}
}

// poke makes the loop look again.
func (l *life) poke() {
	select {
	case l.pokes <- struct{}{}:
	default:
	}
}

// begin and end mark a request: whoever asks is a server, for as long as it asks.
func (l *life) begin() { l.busy.Add(1) }

func (l *life) end() {
	now := time.Now()
	l.touched.Store(&now)
	l.busy.Add(-1)
	l.poke()
}

// leave ends sandboxd.
func (l *life) leave() { l.once.Do(func() { close(l.leaving) }) }

// live runs until sandboxd leaves.
func (d *Daemon) live() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-d.life.pokes:
		case <-d.life.leaving:
			return
		}
		now := time.Now()
		if d.abandoned() {
			d.log.Error("leaving: the state directory was removed", "sandboxes", d.living())
			d.endAll(context.Background())
			d.life.leave()
			return
		}
		timer.Reset(min(d.enforceDeadlines(now), d.considerLeaving(now), recheck))
	}
}

// enforceDeadlines ends what is over its time, if no server has been there for a while to do it. It returns when to
// look again.
func (d *Daemon) enforceDeadlines(now time.Time) time.Duration {
	absence := d.watchers.absence()
	if absence.IsZero() {
		return recheck
	}
	if wait := absence.Add(d.config.DeadlineGrace).Sub(now); wait > 0 {
		return wait
	}
	next := recheck
	for _, s := range d.all() {
		s.mu.Lock()
		deadline, running := s.record.Deadline, s.state == wire.ReportStateRunning
		s.mu.Unlock()
		if deadline.IsZero() || !running {
			continue
		}
		if wait := deadline.Sub(now); wait > 0 {
			next = min(next, wait)
			continue
		}
		d.log.Info("deadline", "sandbox", s.record.ID, "deadline", deadline)
		d.end(s, wire.NodeEndReasonExpired)
	}
	return next
}

// considerLeaving leaves when there has been neither sandbox nor server for a while. Ends that nobody fetched are on
// disk and wait there. It returns when to look again.
func (d *Daemon) considerLeaving(now time.Time) time.Duration {
	if d.life.busy.Load() > 0 || d.watchers.absence().IsZero() || d.living() > 0 {
		d.life.idle = time.Time{}
		return recheck
	}
	if d.life.idle.IsZero() {
		d.life.idle = now
	}
	if touched := d.life.touched.Load(); touched != nil && touched.After(d.life.idle) {
		d.life.idle = *touched
	}
	wait := d.life.idle.Add(d.config.IdleExit).Sub(now)
	if wait <= 0 {
		d.log.Info("leaving: neither sandbox nor server", "after", d.config.IdleExit.String())
		d.life.leave()
	}
	return wait
}

// abandoned tells that the state directory is gone, or another one in its place: no server will ever find this sandboxd
// or its sandboxes again.
func (d *Daemon) abandoned() bool {
	here, err := d.lock.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(d.lock.Name())
	return errors.Is(err, os.ErrNotExist) || err == nil && !os.SameFile(here, there)
}

// endAll ends every sandbox and waits until all have ended.
func (d *Daemon) endAll(ctx context.Context) error {
	for _, s := range d.all() {
		<-s.made
		d.end(s, wire.NodeEndReasonKilled)
	}
	for _, s := range d.all() {
		select {
		case <-s.ended:
		case <-s.gone:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// living counts the sandboxes that have, or are getting, a process.
func (d *Daemon) living() int {
	n := 0
	for _, s := range d.all() {
		if s.alive() {
			n++
		}
	}
	return n
}
