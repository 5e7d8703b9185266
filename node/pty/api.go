// SPDX-License-Identifier: Apache-2.0

// Package pty gives terminals to clients over WebSockets. A terminal outlives its connections: one who comes back
// sees what it missed.
package pty

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

const (
	terminalsMax = 32
	bodyMax      = 1 << 20
	defaultTerm  = "xterm-256color"
)

// API is the terminals of a sandbox. A terminal stays until it is deleted or the sandbox ends.
type API struct {
	Spawner *spawn.Spawner
	Runner  *command.Runner // prepares the programs
	Log     *slog.Logger

	mu        sync.Mutex
	terminals map[string]*terminal
	order     []*terminal
	closed    bool
}

// Routes adds the terminal API.
func (a *API) Routes(mux *http.ServeMux) {
	mux.HandleFunc("POST /pty", a.serveCreate)
	mux.HandleFunc("GET /ptys", a.serveList)
	mux.HandleFunc("GET /pty/{id}", a.serveGet)
	mux.HandleFunc("DELETE /pty/{id}", a.serveDelete)
	mux.HandleFunc("GET /pty/{id}/ws", a.serveConnect)
}

func (a *API) serveCreate(w http.ResponseWriter, req *http.Request) {
	body := wire.CreatePtyRequest{Cols: 80, Rows: 24}
	if req.ContentLength != 0 {
		if err := reply.Decode(w, req, &body, bodyMax, wire.CodeInvalidRequestBody); err != nil {
			reply.Error(w, req, err)
			return
		}
	}
	t, err := a.create(body)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	reply.JSON(w, http.StatusCreated, wire.SessionCreated{SessionID: t.id})
}

func (a *API) create(body wire.CreatePtyRequest) (*terminal, error) {
	for _, size := range []struct {
		name  string
		value int
	}{{"cols", body.Cols}, {"rows", body.Rows}} {
		if size.value < 1 || size.value > 65535 {
			return nil, reply.Errorf(wire.CodeInvalidRequestBody, "%s must be between 1 and 65535.", size.name)
		}
	}
	if body.Term == "" {
		body.Term = defaultTerm
	}
	// Everything that is wrong with it now is said now and not to the first client.
	p, err := a.program(&body)
	if err != nil {
		return nil, err
	}
	p.Close()
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails
	t := &terminal{api: a, id: hex.EncodeToString(random[:]), body: body, changed: make(chan struct{})}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.closed:
		return nil, reply.Errorf(wire.CodeRuntimeError, "The sandbox is ending.")
	case len(a.order) >= terminalsMax:
		return nil, reply.Errorf(wire.CodeResourceExhausted, "There are %d terminals, more are not possible.", terminalsMax).
			WithHint("Delete one that is not needed any more.")
	}
	if a.terminals == nil {
		a.terminals = map[string]*terminal{}
	}
	a.terminals[t.id] = t
	a.order = append(a.order, t)
	return t, nil
}

// program resolves what a terminal is to run.
func (a *API) program(body *wire.CreatePtyRequest) (*command.Program, error) {
	run := &wire.RunCommandRequest{Argv: body.Argv, Cwd: body.Cwd, Envs: map[string]string{"TERM": body.Term}}
	maps.Copy(run.Envs, body.Envs)
	switch {
	case body.Command != "" && len(body.Argv) > 0:
		return nil, reply.Errorf(wire.CodeInvalidRequestBody, "Give either command or argv, not both.")
	case len(body.Argv) > 0:
	case a.Runner.Lookup("bash") != "":
		run.Argv = []string{"bash", "--norc", "--noprofile"}
	default:
		run.Argv = []string{"sh"}
	}
	if body.Command != "" {
		run.Argv = append(run.Argv, "-c", body.Command)
	}
	return a.Runner.Program(run)
}

func (a *API) find(req *http.Request) (*terminal, error) {
	id := req.PathValue("id")
	a.mu.Lock()
	defer a.mu.Unlock()
	if t := a.terminals[id]; t != nil {
		return t, nil
	}
	return nil, notFound(id)
}

func notFound(id string) error {
	if len(id) > 64 {
		id = strings.ToValidUTF8(id[:64], "?") + "…"
	}
	return reply.Errorf(wire.CodeContextNotFound, "There is no terminal %q.", id).WithHint("GET /ptys lists those that exist.")
}

func (a *API) serveList(w http.ResponseWriter, _ *http.Request) {
	a.mu.Lock()
	all := slices.Clone(a.order)
	a.mu.Unlock()
	list := wire.PtyList{Items: make([]wire.Pty, 0, len(all))}
	for _, t := range all {
		list.Items = append(list.Items, t.info())
	}
	reply.JSON(w, http.StatusOK, list)
}

func (a *API) serveGet(w http.ResponseWriter, req *http.Request) {
	t, err := a.find(req)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	reply.JSON(w, http.StatusOK, t.info())
}

func (a *API) serveDelete(w http.ResponseWriter, req *http.Request) {
	id := req.PathValue("id")
	a.mu.Lock()
	t := a.terminals[id]
	delete(a.terminals, id)
	a.order = slices.DeleteFunc(a.order, func(o *terminal) bool { return o == t })
	a.mu.Unlock()
	if t == nil {
		reply.Error(w, req, notFound(id))
		return
	}
	t.end()
	w.WriteHeader(http.StatusOK)
}

func (a *API) serveConnect(w http.ResponseWriter, req *http.Request) {
	t, err := a.find(req)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	query := req.URL.Query()
	flag := func(name, usual string) bool {
		value := query.Get(name)
		if value == "" {
			value = usual
		}
		if value != "0" && value != "1" && err == nil {
			err = reply.Errorf(wire.CodeInvalidQuery, "%s must be 0 or 1, not %q.", name, value)
		}
		return value == "1"
	}
	viewer, takeover, mode := flag("viewer", "0"), flag("takeover", "0"), wire.PtyModePipe
	if flag("pty", "1") {
		mode = wire.PtyModePty
	}
	var since int64
	if text := query.Get("since"); text != "" && err == nil {
		if since, err = strconv.ParseInt(text, 10, 64); err != nil || since < 0 {
			err = reply.Errorf(wire.CodeInvalidQuery, "since must be an offset, not %q.", text)
		}
	}
	if err == nil && viewer && takeover {
		err = reply.Errorf(wire.CodeInvalidQuery, "A viewer takes nobody's place.").WithHint("Give either viewer=1 or takeover=1.")
	}
	if err == nil && !strings.EqualFold(req.Header.Get("Upgrade"), "websocket") {
		err = reply.Errorf(wire.CodeInvalidRequestBody, "This is a WebSocket.").WithHint("Connect with a WebSocket client.")
	}
	var g *guest
	if err == nil {
		g, err = t.admit(viewer, takeover, mode)
	}
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	defer t.leave(g)
	t.serve(w, req, g, since)
}

// Close ends all terminals and refuses new ones. It waits as long as ctx allows.
func (a *API) Close(ctx context.Context) error {
	a.mu.Lock()
	a.closed = true
	all := a.order
	a.order, a.terminals = nil, nil
	a.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		var ends sync.WaitGroup
		for _, t := range all {
			ends.Go(t.end)
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
