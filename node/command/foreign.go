// SPDX-License-Identifier: Apache-2.0

package command

import (
	"math"
	"net/http"
	"time"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

// This file is for packages that run programs in another way than one process per command (a shell that stays, a
// terminal) and want them prepared, recorded and streamed like commands.

// Program is a checked request, ready to be started: everything in Spec but the descriptors. Close it.
type Program struct {
	Spec spawn.Spec
	Cwd  string
}

// Close gives the directory back.
func (p *Program) Close() { _ = p.Spec.Dir.Close() }

// Program resolves a request as Run does: user, environment, directory, the program's file. A program that does not
// exist has an empty Spec.Path.
func (r *Runner) Program(req *wire.RunCommandRequest) (*Program, error) {
	l, err := r.prepare(req)
	if err != nil {
		return nil, err
	}
	l.spec.Path, l.spec.Args, l.spec.OOMScoreAdj = l.path, l.argv, 500
	return &Program{Spec: l.spec, Cwd: l.record.Cwd}, nil
}

// Lookup finds a program in the PATH that commands get; empty: there is none.
func (r *Runner) Lookup(name string) string { return find(name, r.environment(nil)) }

// Path resolves a path of a request as a command's cwd: ~ and $VAR expanded, absolute. The directory need not exist.
func (r *Runner) Path(path string) (string, error) { return r.resolve(path, r.environment(nil)) }

// StartFailed is the end of a program that did not begin.
func StartFailed(what string, err error) *wire.CommandEnd { return startFailed(what, err) }

// Foreign is a command that somebody else runs: it has a record, a place in the journal and a log, but no process of
// its own.
type Foreign struct {
	runner *Runner
	*Command
}

// Begin records a foreign command. Its maker feeds it with Write and must call Finish, once.
func (r *Runner) Begin(content, cwd string, req *http.Request) (*Foreign, error) {
	by := callerOf(req)
	c := &Command{done: make(chan struct{})}
	c.rec = Record{
		ID: newID(), Content: shorten(content), Cwd: cwd, StartedAt: now(),
		RequestID: by.RequestID, Client: by.Client, UserAgent: by.UserAgent,
	}
	c.before, _ = r.measure()
	if err := r.admit(c); err != nil {
		return nil, err
	}
	c.log.opened(1)
	if r.journal.write(&c.rec) {
		r.compact()
	}
	return &Foreign{r, c}, nil
}

// Interruptible says how DELETE /command ends it; stop must not wait.
func (f *Foreign) Interruptible(stop func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stop = stop
}

// Write stores output.
func (f *Foreign) Write(s Stream, data []byte) { f.log.append(s, data) }

// Finish records the end; nothing may be written any more.
func (f *Foreign) Finish(end *wire.CommandEnd) {
	f.runner.end(f.Command, end)
	f.log.writerGone()
	f.runner.running.Done()
}

// Classify gives the typed end of the process that ran this command, when that has ended by itself.
func (f *Foreign) Classify(p *spawn.Process) *wire.CommandEnd {
	status, known := p.Status()
	var kills int64
	if last, ok := f.runner.measure(); ok {
		kills = last.OOMKills - f.before.OOMKills
	}
	return classify(status, known, nobody, kills)
}

// ServeLog answers with what it has written so far, from the byte on that the query names, but not more than most. The
// header named by key says where to go on.
func (f *Foreign) ServeLog(w http.ResponseWriter, req *http.Request, key string, most int64) {
	cursor, err := number(req, "cursor", 0, 0, math.MaxInt64)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	end, base, _ := f.log.extent()
	end = min(end, max(cursor, base)+most)
	sendLog(w, req, key, cursor, base, end, func(from int64) (*Reader, error) { return f.log.follow(from, true) })
}

// Streamer writes events of foreign commands to a client.
type Streamer struct {
	runner  *Runner
	w       http.ResponseWriter
	req     *http.Request
	framer  *framer
	started time.Time
}

// Stream begins an event stream with its init event, which is sent at once.
func (r *Runner) Stream(w http.ResponseWriter, req *http.Request, id string, exact bool) (*Streamer, error) {
	eventHeaders(w.Header())
	s := &Streamer{runner: r, w: w, req: req, framer: newFramer(w, exact), started: time.Now()}
	return s, s.Event(wire.ExecutionEventTypeInit, id)
}

// StreamPieces is Stream for who makes the events of output itself: texts as they come.
func (r *Runner) StreamPieces(w http.ResponseWriter, req *http.Request, id string) (*Streamer, error) {
	eventHeaders(w.Header())
	s := &Streamer{runner: r, w: w, req: req, framer: newFramer(w, false), started: time.Now()}
	s.framer.pieces = true
	return s, s.Event(wire.ExecutionEventTypeInit, id)
}

// Event sends an event with a text.
func (s *Streamer) Event(kind wire.ExecutionEventType, text string) error {
	s.framer.event(kind, text)
	return s.flush()
}

// Heartbeat sends pings until done is closed or the client is gone; it says whether done was closed.
func (s *Streamer) Heartbeat(done <-chan struct{}) bool {
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			return true
		case <-ticker.C:
			if s.Event(wire.ExecutionEventTypePing, "pong") != nil {
				return false
			}
		case <-s.req.Context().Done():
			return false
		}
	}
}

// Follow sends the output of a command and its end; it returns early when the client is gone.
func (s *Streamer) Follow(f *Foreign) {
	s.runner.stream(http.NewResponseController(s.w), s.req, f.Command, s.framer, 0)
}

// End ends a stream that never came to its command.
func (s *Streamer) End(end *wire.CommandEnd) {
	s.framer.terminal(end, time.Since(s.started))
	_ = s.flush()
}

func (s *Streamer) flush() error {
	s.framer.flush()
	if s.framer.gone != nil {
		return s.framer.gone
	}
	return http.NewResponseController(s.w).Flush()
}
