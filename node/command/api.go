// SPDX-License-Identifier: Apache-2.0

package command

import (
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const (
	bodyMax   = 8 << 20 // larger than the kernel takes as arguments
	heartbeat = 3 * time.Second
	// prelude is how long the init event waits for company: most commands have said something or ended by then, and the
	// client, and all on the way to it, are woken once instead of twice. Output never waits.
	prelude   = 5 * time.Millisecond
	cursorKey = "EXECD-COMMANDS-TAIL-CURSOR"
	lostKey   = "EXECD-COMMANDS-LOST-BYTES"
)

// Routes adds the command API.
func (r *Runner) Routes(mux *http.ServeMux) {
	mux.HandleFunc("POST /command", r.serveRun)
	mux.HandleFunc("DELETE /command", r.serveInterrupt)
	mux.HandleFunc("GET /commands", r.serveList)
	mux.HandleFunc("POST /command/{id}/stdin", func(w http.ResponseWriter, req *http.Request) {
		r.serveInput(w, req, req.PathValue("id"))
	})
	// One pattern: /command/status/{id} and /command/{id}/logs both fit /command/status/logs, which the mux refuses.
	mux.HandleFunc("GET /command/{first}/{second}", func(w http.ResponseWriter, req *http.Request) {
		first, second := req.PathValue("first"), req.PathValue("second")
		switch {
		case first == "status":
			r.serveStatus(w, req, second)
		case second == "logs":
			r.serveLogs(w, req, first)
		case second == "attach":
			r.serveAttach(w, req, first)
		default:
			reply.Error(w, req, reply.Errorf(wire.CodeGeneralNotFound, "There is no route %s.", req.URL.Path))
		}
	})
}

func (r *Runner) serveRun(w http.ResponseWriter, req *http.Request) {
	var body wire.RunCommandRequest
	if err := reply.Decode(w, req, &body, bodyMax, wire.CodeInvalidRequestBody); err != nil {
		reply.Error(w, req, err)
		return
	}
	key, err := keyOf(req)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	c, err := r.RunOnce(req.Context(), key, &body, callerOf(req))
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	eventHeaders(w.Header())
	f := newFramer(w, body.Exact)
	f.event(wire.ExecutionEventTypeInit, c.rec.ID)
	if body.Background && c.Pid() != 0 {
		f.terminal(nil, time.Since(c.rec.StartedAt))
		f.flush()
		return
	}
	r.stream(http.NewResponseController(w), req, c, f, 0)
}

// serveAttach sends the events of a command from a byte of its output on.
func (r *Runner) serveAttach(w http.ResponseWriter, req *http.Request, id string) {
	c, err := r.Find(id)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	exact, err := flag(req, "exact")
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	offset, err := number(req, "offset", 0, 0, math.MaxInt64)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	end, finished := c.log.own()
	if offset > end && !(finished && offset == end+1) { // see close
		reply.Error(w, req, reply.Errorf(wire.CodeInvalidQuery, "offset is %d, and command %s has written %d bytes.", offset, id, end).
			WithHint("Give the offset of the last event you have, or 0."))
		return
	}
	eventHeaders(w.Header())
	f := newFramer(w, exact)
	f.event(wire.ExecutionEventTypeInit, c.rec.ID)
	r.stream(http.NewResponseController(w), req, c, f, offset)
}

// serveList answers with the newest commands.
func (r *Runner) serveList(w http.ResponseWriter, req *http.Request) {
	limit, err := number(req, "limit", 100, 1, 1000)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	running, err := flag(req, "running")
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	list := wire.CommandList{Items: []wire.CommandStatus{}}
	for _, c := range r.newest(int(limit), func(c *Command) bool {
		return !req.URL.Query().Has("running") || c.ended() != running
	}) {
		list.Items = append(list.Items, c.status())
	}
	reply.JSON(w, http.StatusOK, list)
}

// flag reads a query parameter that is true or false; absent: false.
func flag(req *http.Request, name string) (bool, error) {
	query := req.URL.Query()
	switch text := query.Get(name); {
	case text == "true":
		return true, nil
	case text == "false" || !query.Has(name):
		return false, nil
	default:
		return false, reply.Errorf(wire.CodeInvalidQuery, "%s must be true or false, not %q.", name, text)
	}
}

// number reads a query parameter that is a number between two bounds.
func number(req *http.Request, name string, absent, least, most int64) (int64, error) {
	text := req.URL.Query().Get(name)
	if text == "" {
		return absent, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < least || n > most {
		return 0, reply.Errorf(wire.CodeInvalidQuery, "%s must be a number between %d and %d, not %q.", name, least, most, text)
	}
	return n, nil
}

// eventHeaders says that events follow, which nobody on the way should hold back.
func eventHeaders(h http.Header) {
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
}

// Bounds of what is kept about a caller: both fields are its own words.
const (
	clientMax = 64
	agentMax  = 200
)

// Caller is who asked for a command, as far as it is known.
type Caller struct {
	RequestID string
	Client    string
	UserAgent string
}

// callerOf reads who asks. ingress puts the address of its peer first; a request that did not come through it may claim
// anything, like everything else in a sandbox.
func callerOf(req *http.Request) Caller {
	client, _, _ := strings.Cut(req.Header.Get("X-Forwarded-For"), ",")
	return Caller{
		RequestID: reply.RequestID(req),
		Client:    bounded(strings.TrimSpace(client), clientMax),
		UserAgent: bounded(req.UserAgent(), agentMax),
	}
}

func bounded(text string, most int) string {
	if len(text) > most {
		text = text[:most]
	}
	return strings.ToValidUTF8(text, "?")
}

// stream sends a command's output from an offset until its end or until the client is gone; the command does not mind.
func (r *Runner) stream(control *http.ResponseController, req *http.Request, c *Command, f *framer, offset int64) {
	reader, err := c.log.follow(offset, false)
	if err == nil {
		defer reader.Close()
		f.reader = reader
		err = f.resume()
	}
	if err != nil {
		r.Log.Error("reading output", "command", c.rec.ID, "error", err)
		panic(http.ErrAbortHandler)
	}
	buf := buffers.Get().(*[chunk]byte)
	defer buffers.Put(buf)
	var missed int64 // bytes this client did not get
	ticker := time.NewTicker(prelude)
	defer ticker.Stop()
	begun := false // something has been sent
	for {
		n, s, lost, done, err := reader.Read(buf[:])
		missed += f.missing(lost)
		if err == nil {
			f.feed(s, buf[:n])
			if done {
				f.close()
			}
			err = f.failed
		}
		if err != nil {
			// The connection breaks: better than an end that was not seen.
			r.Log.Error("reading output", "command", c.rec.ID, "error", err)
			panic(http.ErrAbortHandler)
		}
		missed += f.missing(f.lost)
		f.lost = 0
		if done {
			rec := c.Record()
			if _, _, failed := c.log.extent(); missed == 0 && failed == nil {
				// The spool has lost its beginning, but not before it was sent.
				end := *rec.End
				end.OutputTruncated = nil
				rec.End = &end
			}
			f.terminal(rec.End, rec.FinishedAt.Sub(rec.StartedAt))
			f.flush()
			return
		}
		if n > 0 && !begun {
			begun = true
			ticker.Reset(heartbeat)
		}
		// Events gather while there is output, and go out when there is none or a chunk is full.
		if len(f.out) >= chunk || n == 0 && begun {
			f.flush()
		}
		if f.gone != nil {
			return
		}
		if n > 0 {
			continue
		}
		if begun {
			if err := control.Flush(); err != nil {
				return
			}
		}
		if f.open != nil {
			// A ping ends the event of a line that is being sent: only when nothing else shows that we are here.
			ticker.Reset(heartbeat)
		}
		select {
		case <-reader.Ready():
		case <-ticker.C:
			if begun {
				f.event(wire.ExecutionEventTypePing, "pong")
				continue
			}
			begun = true
			ticker.Reset(heartbeat)
		case <-req.Context().Done():
			return
		}
	}
}

func (r *Runner) serveInterrupt(w http.ResponseWriter, req *http.Request) {
	id := req.URL.Query().Get("id")
	if id == "" {
		reply.Error(w, req, reply.Errorf(wire.CodeMissingQuery, "The query parameter id is missing."))
		return
	}
	if err := r.Interrupt(req.Context(), id); err != nil {
		reply.Error(w, req, err)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (r *Runner) serveStatus(w http.ResponseWriter, req *http.Request, id string) {
	c, err := r.Find(id)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	reply.JSON(w, http.StatusOK, c.status())
}

// serveLogs gives the output of a command in the background from a byte offset on, exactly as it was written.
func (r *Runner) serveLogs(w http.ResponseWriter, req *http.Request, id string) {
	c, err := r.Find(id)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	if !c.rec.Background {
		reply.Error(w, req, reply.Errorf(wire.CodeInvalidRequestBody, "Command %s is not running in background.", c.rec.ID).
			WithHint("Output of a foreground command comes in the stream that started it; GET /command/{id}/attach gives it again."))
		return
	}
	cursor, err := number(req, "cursor", 0, 0, math.MaxInt64)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	end, base, _ := c.log.extent()
	follow := func(from int64) (*Reader, error) { return c.log.follow(from, true) }
	if query := req.URL.Query(); query.Has("stream") {
		s := Stream(slices.Index(streamNames[:], query.Get("stream")))
		if s > Stderr {
			reply.Error(w, req, reply.Errorf(wire.CodeInvalidQuery, "stream must be stdout or stderr, not %q.", query.Get("stream")))
			return
		}
		if c.rec.Merged {
			reply.Error(w, req, reply.Errorf(wire.CodeInvalidQuery, "Command %s did not keep its streams apart.", c.rec.ID).
				WithHint("Start it with merge: false, or leave stream out."))
			return
		}
		end, base = c.log.extentOf(s)
		follow = func(from int64) (*Reader, error) { return c.log.followStream(s, from) }
	}
	sendLog(w, req, cursorKey, cursor, base, end, follow)
}

// sendLog answers with a log from a cursor to its end, of which the header named by key tells; before base nothing is kept.
func sendLog(w http.ResponseWriter, req *http.Request, key string, cursor, base, end int64, follow func(int64) (*Reader, error)) {
	from := min(max(cursor, base), end)
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	// The answer is what is there now, so its end is known before it is sent.
	h.Set(key, strconv.FormatInt(end, 10))
	h.Set("Content-Length", strconv.FormatInt(end-from, 10))
	if cursor < base {
		h.Set(lostKey, strconv.FormatInt(base-cursor, 10))
	}
	if from == end {
		return
	}
	reader, err := follow(from)
	if err != nil {
		h.Del("Content-Length")
		reply.Error(w, req, err)
		return
	}
	defer reader.Close()
	buf := buffers.Get().(*[chunk]byte)
	defer buffers.Put(buf)
	for from < end {
		n, _, lost, _, err := reader.Read(buf[:min(chunk, end-from)])
		if err == nil && (lost > 0 || n == 0) {
			err = io.ErrUnexpectedEOF // dropped while it was sent
		}
		if err != nil {
			panic(http.ErrAbortHandler) // the length has been promised
		}
		if _, err := w.Write(buf[:n]); err != nil {
			return
		}
		from += int64(n)
	}
}
