// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"opensandbox.io/node/wire"
)

// heartbeat is how often a watcher hears that sandboxd lives.
const heartbeat = 10 * time.Second

// watchers are the open /events connections; while there is one, a server counts as connected.
type watchers struct {
	mu   sync.Mutex
	open map[chan wire.Event]bool
	// also hears every event before the watchers do.
	also func(wire.Event)
	// last is when the last one left, or when sandboxd started.
	last time.Time
}

func newWatchers() *watchers {
	return &watchers{open: map[chan wire.Event]bool{}, last: time.Now()}
}

// maxBehind is how many events a watcher may be late before it is dropped; it comes back and hears every end that
// was not acknowledged.
const maxBehind = 1024

func (w *watchers) join() chan wire.Event {
	events := make(chan wire.Event, maxBehind)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open[events] = true
	return events
}

func (w *watchers) leave(events chan wire.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open[events] {
		delete(w.open, events)
		close(events)
	}
	w.last = time.Now()
}

func (w *watchers) tell(event wire.Event) {
	w.mu.Lock()
	also := w.also
	w.mu.Unlock()
	if also != nil {
		also(event)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for events := range w.open {
		select {
		case events <- event:
		default:
			delete(w.open, events)
			close(events)
		}
	}
}

// hear has a function called with every event from now on.
func (w *watchers) hear(also func(wire.Event)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.also = also
}

// absence is since when no server has been connected; the zero time while one is.
func (w *watchers) absence() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.open) > 0 {
		return time.Time{}
	}
	return w.last
}

// watch serves one /events connection.
func (d *Daemon) watch(w http.ResponseWriter, r *http.Request) error {
	// Joined before the unacknowledged ends are listed: an end may be told twice, never not at all.
	events := d.watchers.join()
	defer func() {
		d.watchers.leave(events)
		d.life.poke()
	}()
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	encoder := json.NewEncoder(w)
	flusher := http.NewResponseController(w)
	tell := func(event wire.Event) bool { return encoder.Encode(event) == nil && flusher.Flush() == nil }
	if !tell(wire.Event{Type: wire.EventTypeHello}) {
		return nil
	}
	for _, s := range d.all() {
		if s.alive() {
			continue
		}
		if report := d.report(s); !report.Acknowledged && !tell(wire.Event{Type: wire.EventTypeEnded, Report: &report}) {
			return nil
		}
	}
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	for {
		var event wire.Event
		select {
		case next, open := <-events:
			if !open {
				return nil
			}
			event = next
		case <-beat.C:
			event = wire.Event{Type: wire.EventTypeHeartbeat}
		case <-r.Context().Done():
			return nil
		case <-d.life.leaving:
			return nil
		}
		if !tell(event) {
			return nil
		}
	}
}
