// SPDX-License-Identifier: Apache-2.0

package command

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const (
	bodyMax   = 8 << 20 // larger than the kernel takes as arguments
	heartbeat = 3 * time.Second
	cursorKey = "EXECD-COMMANDS-TAIL-CURSOR"
	lostKey   = "EXECD-COMMANDS-LOST-BYTES"
)

// Routes adds the command API.
func (r *Runner) Routes(mux *http.ServeMux) {
	mux.HandleFunc("POST /command", r.serveRun)
	mux.HandleFunc("DELETE /command", r.serveInterrupt)
	// One pattern: /command/status/{id} and /command/{id}/logs both fit /command/status/logs, which the mux refuses.
	mux.HandleFunc("GET /command/{first}/{second}", func(w http.ResponseWriter, req *http.Request) {
		first, second := req.PathValue("first"), req.PathValue("second")
		switch {
		case first == "status":
			r.serveStatus(w, req, second)
		case second == "logs":
			r.serveLogs(w, req, first)
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
	c, err := r.Run(&body, callerOf(req))
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
	r.stream(http.NewResponseController(w), req, c, f)
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

// stream sends a command's output until its end or until the client is gone; the command does not mind.
func (r *Runner) stream(control *http.ResponseController, req *http.Request, c *Command, f *framer) {
	reader, err := c.log.follow(0, false)
	if err != nil {
		r.Log.Error("reading output", "command", c.rec.ID, "error", err)
		return
	}
	defer reader.Close()
	f.reader = reader
	buf := buffers.Get().(*[chunk]byte)
	defer buffers.Put(buf)
	var missed int64 // bytes this client did not get
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
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
		// Events gather while there is output, and go out when there is none or a chunk is full.
		if len(f.out) >= chunk || n == 0 {
			f.flush()
		}
		if f.gone != nil {
			return
		}
		if n > 0 {
			continue
		}
		if err := control.Flush(); err != nil {
			return
		}
		if f.open != nil {
			// A ping ends the event of a line that is being sent: only when nothing else shows that we are here.
			ticker.Reset(heartbeat)
		}
		select {
		case <-reader.Ready():
		case <-ticker.C:
			f.event(wire.ExecutionEventTypePing, "pong")
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
	rec := c.Record()
	reply.JSON(w, http.StatusOK, rec.status())
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
			WithHint("Output of a foreground command comes in the stream that started it."))
		return
	}
	var cursor int64
	if text := req.URL.Query().Get("cursor"); text != "" {
		if cursor, err = strconv.ParseInt(text, 10, 64); err != nil || cursor < 0 {
			reply.Error(w, req, reply.Errorf(wire.CodeInvalidQuery, "cursor must be a byte offset, not %q.", text))
			return
		}
	}
	end, base, _ := c.log.extent()
	from := min(max(cursor, base), end)
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	// The answer is what is there now, so its end is known before it is sent.
	h.Set(cursorKey, strconv.FormatInt(end, 10))
	h.Set("Content-Length", strconv.FormatInt(end-from, 10))
	if cursor < base {
		h.Set(lostKey, strconv.FormatInt(base-cursor, 10))
	}
	if from == end {
		return
	}
	reader, err := c.log.follow(from, true)
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
