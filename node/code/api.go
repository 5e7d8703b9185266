// SPDX-License-Identifier: Apache-2.0

// Package code runs cells: pieces of code in contexts that keep what earlier cells defined. Each context is a process,
// its kernel, that speaks a small line protocol (kernel/python.py describes it); what comes from it is hostile.
package code

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

const (
	contextsMax = 64
	bodyMax     = 8 << 20
	timeoutMax  = 366 * 24 * time.Hour
	keepLost    = 32 // contexts that ended by themselves and are explained to whoever asks for them
	// commandKey tells under which id a cell is recorded: GET /command/status/{id} and the journal know it.
	commandKey = "EXECD-COMMAND-ID"
	// plainCommand is the language of code that names none: a command, run as POST /command does.
	plainCommand = "command"
)

// API is the code contexts of a sandbox. Nothing runs before the first of them is asked for, or Warm is called.
type API struct {
	Spawner *spawn.Spawner
	Runner  *command.Runner // records the cells and keeps their output
	Log     *slog.Logger

	routes   *http.ServeMux
	python   python
	lines    budget
	defaults sync.Mutex // held while a default context is looked for or made

	mu       sync.Mutex
	contexts map[string]*codeContext
	order    []*codeContext
	standard map[string]*codeContext // the default one of each language
	making   int
	lost     []lostContext
	closed   bool
	probe    *probe
}

type lostContext struct{ id, why string }

// Languages are those that a context can have.
func Languages() []string { return []string{"python", "bash"} }

// Routes adds the code API.
func (a *API) Routes(mux *http.ServeMux) {
	a.routes = mux
	mux.HandleFunc("POST /code/context", a.serveCreate)
	mux.HandleFunc("GET /code/contexts", a.serveList)
	mux.HandleFunc("DELETE /code/contexts", a.serveDeleteAll)
	mux.HandleFunc("GET /code/contexts/{id}", a.serveGet)
	mux.HandleFunc("DELETE /code/contexts/{id}", a.serveDelete)
	mux.HandleFunc("POST /code", a.serveRun)
	mux.HandleFunc("DELETE /code", a.serveInterrupt)
}

func (a *API) serveCreate(w http.ResponseWriter, req *http.Request) {
	var body wire.CreateCodeContextRequest
	if err := reply.Decode(w, req, &body, bodyMax, wire.CodeInvalidRequestBody); err != nil {
		reply.Error(w, req, err)
		return
	}
	c, err := a.create(body.Language, body.Cwd, body.Envs)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	reply.JSON(w, http.StatusOK, c.info())
}

func (a *API) serveList(w http.ResponseWriter, req *http.Request) {
	language := req.URL.Query().Get("language")
	list := []wire.CodeContext{} // never null
	for _, c := range a.all() {
		if language == "" || c.language == language {
			list = append(list, c.info())
		}
	}
	reply.JSON(w, http.StatusOK, list)
}

func (a *API) serveGet(w http.ResponseWriter, req *http.Request) {
	c, err := a.find(req.PathValue("id"))
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	reply.JSON(w, http.StatusOK, c.info())
}

func (a *API) serveDelete(w http.ResponseWriter, req *http.Request) {
	c, err := a.find(req.PathValue("id"))
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	c.delete()
	w.WriteHeader(http.StatusOK)
}

func (a *API) serveDeleteAll(w http.ResponseWriter, req *http.Request) {
	language := req.URL.Query().Get("language")
	if language == "" {
		reply.Error(w, req, reply.Errorf(wire.CodeMissingQuery, "The query parameter language is missing."))
		return
	}
	if err := known(language); err != nil {
		reply.Error(w, req, err)
		return
	}
	var ends sync.WaitGroup
	for _, c := range a.all() {
		if c.language == language {
			ends.Go(c.delete)
		}
	}
	ends.Wait()
	w.WriteHeader(http.StatusOK)
}

func (a *API) serveRun(w http.ResponseWriter, req *http.Request) {
	var body wire.RunCodeRequest
	err := reply.Decode(w, req, &body, bodyMax, wire.CodeInvalidRequestBody)
	if err == nil {
		err = check(&body)
	}
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	var ref wire.CodeContextRef
	if body.Context != nil {
		ref = *body.Context
	}
	if ref.ID == "" && (ref.Language == "" || ref.Language == plainCommand) {
		a.runCommand(w, req, &body)
		return
	}
	c, err := a.resolve(ref)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	cell, err := c.run(&body, req)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	w.Header().Set(commandKey, cell.Record().ID)
	cell.stream(w, req)
}

// runCommand runs code of no language: it is a command under another name.
func (a *API) runCommand(w http.ResponseWriter, req *http.Request, body *wire.RunCodeRequest) {
	text, err := json.Marshal(wire.RunCommandRequest{Command: body.Code, Timeout: body.Timeout, Envs: body.Envs})
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	inner := req.Clone(req.Context())
	inner.URL.Path, inner.URL.RawPath, inner.RequestURI = "/command", "", "/command"
	inner.Body, inner.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	a.routes.ServeHTTP(w, inner)
}

func (a *API) serveInterrupt(w http.ResponseWriter, req *http.Request) {
	id := req.URL.Query().Get("id")
	if id == "" {
		reply.Error(w, req, reply.Errorf(wire.CodeMissingQuery, "The query parameter id is missing."))
		return
	}
	c, err := a.find(id)
	if err == nil {
		err = c.interrupt(req.Context())
	} else if _, none := a.Runner.Find(id); none == nil {
		err = a.Runner.Interrupt(req.Context(), id) // code that was a command
	}
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func check(body *wire.RunCodeRequest) error {
	switch {
	case body.Code == "":
		return reply.Errorf(wire.CodeInvalidRequestBody, "Give some code.")
	case body.Timeout != nil && (*body.Timeout < 0 || *body.Timeout > timeoutMax.Milliseconds()):
		return reply.Errorf(wire.CodeInvalidRequestBody, "timeout must be between 0 and %d milliseconds.", timeoutMax.Milliseconds())
	}
	for name, value := range body.Envs {
		if !isName(name) || strings.IndexByte(value, 0) >= 0 {
			return reply.Errorf(wire.CodeInvalidRequestBody, "envs: %q is not a valid variable.", shorten(name))
		}
	}
	return nil
}

func isName(name string) bool {
	for i, c := range []byte(name) {
		if !(c == '_' || c|0x20 >= 'a' && c|0x20 <= 'z' || i > 0 && c >= '0' && c <= '9') {
			return false
		}
	}
	return name != ""
}

func known(language string) error {
	if slices.Contains(Languages(), language) {
		return nil
	}
	return reply.Errorf(wire.CodeInvalidRequestBody, "There is no language %q here; there are %s.", shorten(language), strings.Join(Languages(), ", ")).
		WithHint("Run other languages as commands, with what the image has or what you install.")
}

// resolve gives the context of a request, the language's default one where none is named.
func (a *API) resolve(ref wire.CodeContextRef) (*codeContext, error) {
	if ref.ID == "" {
		return a.standardContext(ref.Language)
	}
	c, err := a.find(ref.ID)
	if err != nil {
		return nil, err
	}
	if ref.Language != "" && ref.Language != c.language {
		return nil, reply.Errorf(wire.CodeInvalidRequestBody, "Context %s is one of %s, not of %q.", c.id, c.language, shorten(ref.Language))
	}
	return c, nil
}

func (a *API) standardContext(language string) (*codeContext, error) {
	if err := known(language); err != nil {
		return nil, err
	}
	a.defaults.Lock()
	defer a.defaults.Unlock()
	a.mu.Lock()
	c := a.standard[language]
	a.mu.Unlock()
	if c != nil {
		return c, nil
	}
	c, err := a.create(language, "", nil)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.contexts[c.id] == c { // else it has ended already
		if a.standard == nil {
			a.standard = map[string]*codeContext{}
		}
		a.standard[language] = c
	}
	return c, nil
}

// create makes a context; when it returns, its process is there.
func (a *API) create(language, cwd string, envs map[string]string) (*codeContext, error) {
	if err := known(language); err != nil {
		return nil, err
	}
	if err := a.reserve(); err != nil {
		return nil, err
	}
	c, err := a.start(language, cwd, envs)
	a.mu.Lock()
	a.making--
	closed := a.closed
	if err == nil && !closed {
		if a.contexts == nil {
			a.contexts = map[string]*codeContext{}
		}
		a.contexts[c.id] = c
		a.order = append(a.order, c)
	}
	a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	go c.live()
	if closed {
		c.delete()
		return nil, ending()
	}
	return c, nil
}

func ending() error { return reply.Errorf(wire.CodeRuntimeError, "The sandbox is ending.") }

// reserve counts a context that is being made.
func (a *API) reserve() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.closed:
		return ending()
	case len(a.order)+a.making >= contextsMax:
		return reply.Errorf(wire.CodeResourceExhausted, "There are %d code contexts, more are not possible.", contextsMax).
			WithHint("Delete one that is not needed any more.")
	}
	a.making++
	return nil
}

func (a *API) all() []*codeContext {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.order)
}

func (a *API) find(id string) (*codeContext, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.contexts[id]; c != nil {
		return c, nil
	}
	for _, l := range a.lost {
		if l.id == id {
			return nil, reply.Errorf(wire.CodeContextNotFound, "The context %s is gone: %s", id, l.why).WithHint("Create another one.")
		}
	}
	return nil, reply.Errorf(wire.CodeContextNotFound, "There is no code context %q.", shorten(id)).
		WithHint("GET /code/contexts lists those that exist.")
}

// forget takes a context off the list. why is for whoever asks for it later; empty: it was deleted.
func (a *API) forget(c *codeContext, why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.contexts[c.id] != c {
		return
	}
	delete(a.contexts, c.id)
	a.order = slices.DeleteFunc(a.order, func(o *codeContext) bool { return o == c })
	if a.standard[c.language] == c {
		delete(a.standard, c.language)
	}
	if why != "" {
		a.lost = append(a.lost, lostContext{c.id, why})
		if len(a.lost) > keepLost {
			a.lost = a.lost[1:]
		}
	}
}

// Close ends all contexts and refuses new ones. It waits as long as ctx allows.
func (a *API) Close(ctx context.Context) error {
	a.mu.Lock()
	a.closed = true
	all := slices.Clone(a.order)
	listener := a.probe
	a.mu.Unlock()
	if listener != nil {
		listener.close()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		var ends sync.WaitGroup
		for _, c := range all {
			ends.Go(c.delete)
		}
		ends.Wait()
		a.python.close()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return errors.Join(errors.New("code contexts"), ctx.Err())
	}
}

func shorten(text string) string {
	if len(text) > 64 {
		return fmt.Sprintf("%s…", strings.ToValidUTF8(text[:64], "?"))
	}
	return text
}
