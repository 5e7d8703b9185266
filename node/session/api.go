// SPDX-License-Identifier: Apache-2.0

package session

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

const (
	sessionsMax = 64
	bodyMax     = 8 << 20
	timeoutMax  = 366 * 24 * time.Hour
	// commandKey tells under which id a run is recorded: GET /command/status/{id} and the journal know it.
	commandKey = "EXECD-COMMAND-ID"
)

// API is the sessions of a sandbox. A session stays until it is deleted or the sandbox ends.
type API struct {
	Spawner *spawn.Spawner
	Runner  *command.Runner // records and streams the runs
	Log     *slog.Logger

	mu       sync.Mutex
	sessions map[string]*session
	order    []*session
	closed   bool
}

// Routes adds the session API.
func (a *API) Routes(mux *http.ServeMux) {
	mux.HandleFunc("POST /session", a.serveCreate)
	mux.HandleFunc("GET /sessions", a.serveList)
	mux.HandleFunc("POST /session/{id}/run", a.serveRun)
	mux.HandleFunc("DELETE /session/{id}", a.serveDelete)
}

func (a *API) serveCreate(w http.ResponseWriter, req *http.Request) {
	var body wire.CreateSessionRequest
	if req.ContentLength != 0 {
		if err := reply.Decode(w, req, &body, bodyMax, wire.CodeInvalidRequestBody); err != nil {
			reply.Error(w, req, err)
			return
		}
	}
	s, err := a.create(body.Cwd)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	reply.JSON(w, http.StatusOK, wire.SessionCreated{SessionID: s.id})
}

func (a *API) create(cwd string) (*session, error) {
	path, err := a.Runner.Path(cwd)
	if err != nil {
		return nil, err
	}
	dir, err := safefile.MakeDir(path)
	if err != nil {
		return nil, reply.Errorf(wire.CodeInvalidRequestBody, "The directory cannot be made: %s: %v", path, err)
	}
	_ = dir.Close()
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails
	s := &session{
		api: a, id: hex.EncodeToString(random[:]), created: time.Now().UTC().Truncate(time.Microsecond), cwd: path,
		gone: make(chan struct{}),
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.closed:
		return nil, reply.Errorf(wire.CodeRuntimeError, "The sandbox is ending.")
	case len(a.order) >= sessionsMax:
		return nil, reply.Errorf(wire.CodeResourceExhausted, "There are %d sessions, more are not possible.", sessionsMax).
			WithHint("Delete one that is not needed any more.")
	}
	if a.sessions == nil {
		a.sessions = map[string]*session{}
	}
	a.sessions[s.id] = s
	a.order = append(a.order, s)
	return s, nil
}

func (a *API) find(id string) *session {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.sessions[id]
}

func (a *API) serveList(w http.ResponseWriter, _ *http.Request) {
	a.mu.Lock()
	all := slices.Clone(a.order)
	a.mu.Unlock()
	list := wire.SessionList{Items: make([]wire.SessionInfo, 0, len(all))}
	for _, s := range all {
		list.Items = append(list.Items, s.info())
	}
	reply.JSON(w, http.StatusOK, list)
}

func (a *API) serveDelete(w http.ResponseWriter, req *http.Request) {
	id := req.PathValue("id")
	s := a.remove(id)
	if s == nil {
		reply.Error(w, req, notFound(id))
		return
	}
	s.end()
	w.WriteHeader(http.StatusOK)
}

// remove takes a session out of the list; only one caller gets it.
func (a *API) remove(id string) *session {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.sessions[id]
	if s != nil {
		delete(a.sessions, id)
		a.order = slices.DeleteFunc(a.order, func(o *session) bool { return o == s })
	}
	return s
}

func (a *API) serveRun(w http.ResponseWriter, req *http.Request) {
	var body wire.RunInSessionRequest
	err := reply.Decode(w, req, &body, bodyMax, wire.CodeInvalidRequestBody)
	if err == nil {
		err = check(&body)
	}
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	id := req.PathValue("id")
	s := a.find(id)
	if s == nil {
		reply.Error(w, req, notFound(id))
		return
	}
	a.serve(w, req, s, &body)
}

// serve runs a command of a checked request when it is its turn.
func (a *API) serve(w http.ResponseWriter, req *http.Request, s *session, body *wire.RunInSessionRequest) {
	var err error
	turn := s.enter()
	defer s.leave(turn)
	var events *command.Streamer
	select {
	case <-turn:
	default:
		// It has to wait. The client hears that it is there.
		if events, err = a.Runner.Stream(w, req, s.id, body.Exact); err != nil || !waitTurn(events, turn, s.gone) {
			return
		}
	}
	a.run(w, req, s, body, events)
}

// waitTurn is true when it is the client's turn, or the session's end, of which it then hears.
func waitTurn(events *command.Streamer, turn, gone <-chan struct{}) bool {
	either := make(chan struct{})
	stop := make(chan struct{})
	go func() {
		defer close(either)
		select {
		case <-turn:
		case <-gone:
		case <-stop:
		}
	}()
	defer func() { close(stop); <-either }()
	return events.Heartbeat(either)
}

// run is a run whose turn has come. events is nil while nothing has been sent.
func (a *API) run(w http.ResponseWriter, req *http.Request, s *session, body *wire.RunInSessionRequest, events *command.Streamer) {
	refuse := func(err error) {
		if events == nil {
			reply.Error(w, req, err)
			return
		}
		events.End(&wire.CommandEnd{Reason: wire.CommandEndReasonStartFailed, Message: reply.Explain(req, err).Message})
	}
	select {
	case <-s.gone:
		refuse(reply.Errorf(wire.CodeContextNotFound, "The session was deleted."))
		return
	default:
	}
	cwd, err := s.directory(body.Cwd)
	if err != nil {
		refuse(err)
		return
	}
	news, err := s.prepare()
	if err != nil {
		refuse(command.StartFault("The session's shell", "bash", err))
		return
	}
	f, err := a.Runner.Begin(body.Command, s.info().Cwd, req)
	if err != nil {
		refuse(err)
		return
	}
	w.Header().Set(commandKey, f.Record().ID)
	r := s.begin(f, cwd, body)
	defer func() {
		r.interrupt() // nothing, where it has ended
		<-r.ended
	}()
	if events == nil {
		if events, err = a.Runner.Stream(w, req, s.id, body.Exact); err != nil {
			return
		}
	}
	for _, text := range news {
		if events.Event(wire.ExecutionEventTypeStatus, text) != nil {
			return
		}
	}
	events.Follow(f)
}

func check(body *wire.RunInSessionRequest) error {
	invalid := func(format string, args ...any) error {
		return reply.Errorf(wire.CodeInvalidRequestBody, format, args...)
	}
	switch {
	case body.Command == "":
		return invalid("Give a command.")
	case strings.IndexByte(body.Command, 0) >= 0:
		return invalid("A command cannot hold a NUL byte.")
	case body.Timeout != nil && (*body.Timeout < 0 || *body.Timeout > timeoutMax.Milliseconds()):
		return invalid("timeout must be between 0 and %d milliseconds.", timeoutMax.Milliseconds())
	}
	return nil
}

// Close ends all sessions and refuses new ones. It waits as long as ctx allows.
func (a *API) Close(ctx context.Context) error {
	a.mu.Lock()
	a.closed = true
	all := a.order
	a.order, a.sessions = nil, nil
	a.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		var ends sync.WaitGroup
		for _, s := range all {
			ends.Go(s.end)
		}
		ends.Wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
