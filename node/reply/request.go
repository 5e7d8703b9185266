// SPDX-License-Identifier: Apache-2.0

package reply

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	"opensandbox.io/node/wire"
)

// state is what one request carries besides its own fields.
type state struct {
	id       string
	trace    string
	internal wire.Code
	cause    error       // what the log should say about a failure
	notes    []slog.Attr // what the log should say besides
	notable  bool
}

type stateKey struct{}

func stateOf(r *http.Request) *state {
	s, _ := r.Context().Value(stateKey{}).(*state)
	return s
}

// RequestID gives the request's id: the caller's X-Request-ID or a fresh one. Empty outside of Handle.
func RequestID(r *http.Request) string {
	if s := stateOf(r); s != nil {
		return s.id
	}
	return ""
}

// Note adds to the request's log line what its handler knows, such as the sandbox it is about.
func Note(r *http.Request, attrs ...slog.Attr) {
	if s := stateOf(r); s != nil {
		s.notes = append(s.notes, attrs...)
	}
}

// Notable has the request's line logged at info: it changes something that somebody may look for later.
func Notable(r *http.Request) {
	if s := stateOf(r); s != nil {
		s.notable = true
	}
}

// Handle wraps a daemon's routes: it sets X-Request-ID on every answer, turns a panic into a 500, and writes one
// log line per request: at debug, at info if it is Notable, as an error if it failed by our fault. internal is the
// code for errors that are nobody's fault but ours.
func Handle(next http.Handler, log *slog.Logger, internal wire.Code) http.Handler {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s := &state{id: requestID(r.Header.Get("X-Request-ID")), trace: traceParent(r.Header), internal: internal}
		w.Header().Set("X-Request-ID", s.id)
		rec := &recorder{ResponseWriter: w}
		r = r.WithContext(context.WithValue(r.Context(), stateKey{}, s))
		start := time.Now()
		defer func() {
			p := recover()
			if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // the sentinel is compared by identity, as net/http does
				s.cause = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
				if !rec.wrote {
					Error(rec, r, errors.New("panic"))
					s.cause = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
				}
			}
			write(log, r, rec, s, time.Since(start))
			// Bytes are already out: only a broken connection tells the client that the answer is not whole.
			if p != nil && (p == http.ErrAbortHandler || rec.wrote && s.cause != nil && rec.status < 500) {
				panic(http.ErrAbortHandler)
			}
		}()
		next.ServeHTTP(rec, r)
	})
}

func write(log *slog.Logger, r *http.Request, rec *recorder, s *state, took time.Duration) {
	level := slog.LevelDebug
	switch {
	case s.cause != nil:
		level = slog.LevelError
	case s.notable:
		level = slog.LevelInfo
	}
	if !log.Enabled(r.Context(), level) {
		return
	}
	status := rec.status
	if status == 0 {
		status = http.StatusOK
	}
	// The path only: a query may hold what the caller does not want in a log.
	attrs := []slog.Attr{
		slog.String("requestId", s.id), slog.String("traceId", TraceID(r)),
		slog.String("method", r.Method), slog.String("path", r.URL.Path),
		slog.Int("status", status), slog.Int64("bytes", rec.bytes), slog.Float64("ms", float64(took.Microseconds())/1000),
	}
	attrs = append(attrs, s.notes...)
	if s.cause != nil {
		attrs = append(attrs, slog.String("error", s.cause.Error()))
	}
	log.LogAttrs(r.Context(), level, "request", attrs...)
}

// requestID keeps the caller's id if it is one that is safe in a header and in a log, and makes one otherwise.
func requestID(given string) string {
	if given != "" && len(given) <= 128 {
		ok := true
		for i := range len(given) {
			if given[i] <= ' ' || given[i] > '~' {
				ok = false
				break
			}
		}
		if ok {
			return given
		}
	}
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// recorder notes status and size. Unwrap keeps http.ResponseController working through it, Flush and ReadFrom keep
// streaming cheap.
type recorder struct {
	http.ResponseWriter
	status int
	bytes  int64
	wrote  bool
}

func (r *recorder) WriteHeader(status int) {
	if !r.wrote && status >= 200 {
		r.status, r.wrote = status, true
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	if !r.wrote {
		r.status, r.wrote = http.StatusOK, true
	}
	n, err := r.ResponseWriter.Write(p)
	r.bytes += int64(n)
	return n, err
}

func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// Flush makes recorder an http.Flusher, which reverse proxies and event streams look for.
func (r *recorder) Flush() {
	r.wrote = true
	if f, ok := r.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}
