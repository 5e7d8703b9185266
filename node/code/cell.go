// SPDX-License-Identifier: Apache-2.0

package code

import (
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const (
	eventsMax = 64 // that wait for the client; more hold the cell up
	// waitingMax is how many bytes of them wait before the cell is held up: a part of the budget, which is for all.
	waitingMax = budgetTotal / 16
	heartbeat  = 3 * time.Second
	chunk      = 64 << 10
)

// Names of errors that are not the code's own.
const (
	nameLost    = "KernelDied"
	nameTimeout = "CellTimeout"
	nameKilled  = "CellKilled"
	nameExit    = "CommandExecError" // as of commands
)

// cell is a piece of code on its way through a context. Its output goes through the spool as that of commands does;
// results and the like wait in memory, each at its place in the output.
type cell struct {
	*command.Foreign
	context *codeContext
	count   int
	code    string
	envs    map[string]string
	timeout time.Duration
	started time.Time
	cancel  chan struct{}

	// Of watch alone.
	why     wire.CommandEndReason // why we stopped it
	problem *wire.ExecutionError  // what the kernel says went wrong
	lost    bool                  // the context ends with it
	unsent  int                   // results that had no room when it was to end
	// problemHeld is what problem takes of the budget; conclude hands it on.
	problemHeld int64

	mu       sync.Mutex
	events   []event
	waiting  int64         // bytes of the budget that events hold
	lastHeld int64         // and that last holds
	left     bool          // the client is gone: nobody will read events
	more     chan struct{} // gets a value when there is an event
	room     chan struct{} // closed when there is room again; nil while there is
	last     wire.ExecutionEvent
}

// event is one that does not come from the output.
type event struct {
	wire.ExecutionEvent
	at   int64 // the byte of the output it stands before
	held int64 // of the budget
}

func newCell(c *codeContext, f *command.Foreign, count int, body *wire.RunCodeRequest) *cell {
	x := &cell{
		Foreign: f, context: c, count: count, code: body.Code, envs: body.Envs, started: time.Now(),
		cancel: make(chan struct{}, 1), more: make(chan struct{}, 1),
	}
	if body.Timeout != nil {
		x.timeout = time.Duration(*body.Timeout) * time.Millisecond
	}
	return x
}

// interrupt asks for the cell's end; it does not wait.
func (x *cell) interrupt() {
	select {
	case x.cancel <- struct{}{}:
	default:
	}
}

// add puts an event behind the output so far.
func (x *cell) add(e event) {
	e.at = x.Size()
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.left {
		x.context.api.lines.release(e.held)
		return
	}
	x.events = append(x.events, e)
	x.waiting += e.held
	if (len(x.events) >= eventsMax || x.waiting >= waitingMax) && x.room == nil {
		x.room = make(chan struct{})
	}
	select {
	case x.more <- struct{}{}:
	default:
	}
}

// waitRoom gives a channel that is closed when the next event can be taken; nil: now.
func (x *cell) waitRoom() <-chan struct{} {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.room
}

// next gives the event that comes next.
func (x *cell) next() (event, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.events) == 0 {
		return event{}, false
	}
	return x.events[0], true
}

// sent takes the event that came next away.
func (x *cell) sent() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.context.api.lines.release(x.events[0].held)
	x.waiting -= x.events[0].held
	x.events[0] = event{}
	x.events = x.events[1:]
	if len(x.events) < eventsMax/2 && x.waiting < waitingMax/2 && x.room != nil {
		close(x.room)
		x.room = nil
	}
}

// leave says that the client is gone: the cell goes on, but nobody waits for its events.
func (x *cell) leave() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.left = true
	x.context.api.lines.release(x.waiting + x.lastHeld)
	x.events, x.waiting = nil, 0
	x.last, x.lastHeld = wire.ExecutionEvent{}, 0
	if x.room != nil {
		close(x.room)
		x.room = nil
	}
}

// end is the end of a cell that its kernel has told of.
func (x *cell) end() *wire.CommandEnd {
	code := 0
	switch {
	case x.why == wire.CommandEndReasonTimedOut:
		return &wire.CommandEnd{Reason: x.why, Message: "It ran into its time limit of " + x.timeout.String() + "."}
	case x.why != "" && x.problem != nil:
		return &wire.CommandEnd{Reason: x.why, Message: "It was interrupted."}
	case x.problem != nil:
		code = 1
		if x.problem.Ename == nameExit {
			code, _ = strconv.Atoi(x.problem.Evalue)
		}
	}
	return &wire.CommandEnd{Reason: wire.CommandEndReasonExited, ExitCode: &code}
}

// conclude records the end. Nothing may be added any more.
func (x *cell) conclude(end *wire.CommandEnd) {
	if x.unsent > 0 {
		x.add(event{ExecutionEvent: status(strconv.Itoa(x.unsent) + " results were dropped, because nobody read them in time.")})
	}
	took := time.Since(x.started).Milliseconds()
	last := wire.ExecutionEvent{Type: wire.ExecutionEventTypeError, Timestamp: time.Now().UnixMilli(), End: end, Error: x.problem}
	switch {
	case end.Reason == wire.CommandEndReasonTimedOut:
		last.Error = x.explain(nameTimeout, end)
	case end.Reason == wire.CommandEndReasonKilled && end.Signal != "":
		last.Error = x.explain(nameKilled, end)
	case end.Reason == wire.CommandEndReasonKilled && x.problem != nil:
	case x.lost:
		last.Error = x.explain(nameLost, end)
	case x.problem == nil:
		last.Type, last.ExecutionTime = wire.ExecutionEventTypeExecutionComplete, &took
	}
	// The record of the cell may keep it for long.
	x.mu.Lock()
	if x.left {
		x.context.api.lines.release(x.problemHeld)
	} else {
		x.last, x.lastHeld = last, x.problemHeld
	}
	x.problem, x.problemHeld = nil, 0
	x.mu.Unlock()
	x.Finish(end)
}

// explain is the error of a cell that did not come to its own end. Where the kernel told at which line it was, that
// stays.
func (x *cell) explain(name string, end *wire.CommandEnd) *wire.ExecutionError {
	text := end.Message
	if name == nameLost {
		text = "The kernel ended (" + command.Describe(end) + "); the context is gone, with all its cells had defined."
	}
	e := &wire.ExecutionError{Ename: name, Evalue: text, Traceback: []string{text}}
	if x.problem != nil && len(x.problem.Traceback) > 0 {
		e.Traceback = x.problem.Traceback
	}
	return e
}

// stream sends a cell's events until its end or until the client is gone; the cell does not mind.
func (x *cell) stream(w http.ResponseWriter, req *http.Request) {
	defer x.leave()
	reader, err := x.Follow()
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	defer reader.Close()
	out, err := x.context.api.Runner.StreamPieces(w, req, x.context.id)
	if err != nil {
		return
	}
	if out.Send(wire.ExecutionEvent{Type: wire.ExecutionEventTypeExecutionCount, Timestamp: now(), ExecutionCount: &x.count}) != nil {
		return
	}
	s := &sender{cell: x, reader: reader, out: out}
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		moved, done, err := s.step()
		if err != nil {
			x.context.api.Log.Debug("sending a cell's events", "error", err)
			return
		}
		if done {
			s.finish()
			return
		}
		if moved {
			continue
		}
		if out.Flush() != nil {
			return
		}
		select {
		case <-reader.Ready():
		case <-x.more:
		case <-ticker.C:
			if out.Event(wire.ExecutionEventTypePing, "pong") != nil {
				return
			}
		case <-req.Context().Done():
			return
		}
	}
}

// sender puts output and events in their order.
type sender struct {
	cell   *cell
	reader *command.Reader
	out    *command.Streamer
	buf    [chunk]byte
	rest   [2][]byte // of each stream, the beginning of a rune whose end is to come
}

// step sends what comes next. moved: there may be more at once.
func (s *sender) step() (moved, done bool, err error) {
	limit := int64(chunk)
	next, waits := s.cell.next()
	if waits {
		limit = min(limit, next.at-s.reader.Offset())
	}
	if limit <= 0 {
		s.flushRest()
		err := s.out.Send(next.ExecutionEvent)
		s.cell.sent()
		return true, false, err
	}
	n, stream, lost, done, err := s.reader.Read(s.buf[:limit])
	if err != nil {
		return false, false, err
	}
	if lost > 0 {
		if err := s.out.Send(status(strconv.FormatInt(lost, 10) + " bytes of output were dropped before they could be sent")); err != nil {
			return false, false, err
		}
	}
	if n > 0 {
		return true, false, s.text(stream, s.buf[:n])
	}
	if done {
		if _, more := s.cell.next(); more {
			// Its place was beyond what the spool has: output was lost.
			e, _ := s.cell.next()
			s.cell.sent()
			return true, false, s.out.Send(e.ExecutionEvent)
		}
	}
	return false, done, nil
}

// text sends output, of a rune only all bytes together.
func (s *sender) text(stream command.Stream, data []byte) error {
	if rest := s.rest[stream]; len(rest) > 0 {
		data = append(rest, data...)
		s.rest[stream] = nil
	}
	if n := command.PartialRune(data); n > 0 {
		s.rest[stream] = append([]byte(nil), data[len(data)-n:]...)
		data = data[:len(data)-n]
	}
	return s.send(stream, data)
}

func (s *sender) send(stream command.Stream, data []byte) error {
	if len(data) == 0 {
		return nil
	}
	kind := wire.ExecutionEventTypeStdout
	if stream == command.Stderr {
		kind = wire.ExecutionEventTypeStderr
	}
	return s.out.Send(wire.ExecutionEvent{Type: kind, Text: string(data), Timestamp: now()})
}

func (s *sender) flushRest() {
	for stream, rest := range s.rest {
		_ = s.send(command.Stream(stream), rest)
		s.rest[stream] = nil
	}
}

func (s *sender) finish() {
	s.flushRest()
	s.cell.mu.Lock()
	last := s.cell.last
	s.cell.mu.Unlock()
	if s.out.Send(last) == nil {
		_ = s.out.Flush()
	}
}

func now() int64 { return time.Now().UnixMilli() }

func status(text string) wire.ExecutionEvent {
	return wire.ExecutionEvent{Type: wire.ExecutionEventTypeStatus, Text: text, Timestamp: now()}
}

// result puts a kernel's value into the published shape: plain text is called text there.
func result(m *message) wire.ExecutionEvent {
	results := make(map[string]any, len(m.Data))
	for _, f := range m.Data {
		if f.mime == "text/plain" {
			f.mime = "text"
		}
		results[f.mime] = f.content
	}
	if text, _ := results["text"].(json.RawMessage); len(text) > 0 && text[0] != '"' {
		delete(results, "text") // clients count on a text
	}
	return wire.ExecutionEvent{Type: wire.ExecutionEventTypeResult, Results: results, Timestamp: now()}
}
