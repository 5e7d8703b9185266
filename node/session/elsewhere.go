// SPDX-License-Identifier: Apache-2.0

package session

import (
	"net/http"
	"time"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// Elsewhere is a session whose shell is started in another way than a command, and that another package lists, finds and
// deletes. Its runs are those of any session.
type Elsewhere struct{ s *session }

// NewElsewhere makes one. program prepares a shell, each time that one is needed, to begin in cwd.
func (a *API) NewElsewhere(id, cwd string, program func(argv []string, cwd string) (*command.Program, error)) *Elsewhere {
	return &Elsewhere{&session{api: a, id: id, created: time.Now(), cwd: cwd, gone: make(chan struct{}), program: program}}
}

// Serve runs a command and streams what comes of it.
func (e *Elsewhere) Serve(w http.ResponseWriter, req *http.Request, body *wire.RunInSessionRequest) {
	if err := check(body); err != nil {
		reply.Error(w, req, err)
		return
	}
	e.s.api.serve(w, req, e.s, body)
}

// Busy: a run is on, or waits.
func (e *Elsewhere) Busy() bool {
	e.s.mu.Lock()
	defer e.s.mu.Unlock()
	return e.s.busy
}

// End deletes it: its run, its shell, its jobs. Once only.
func (e *Elsewhere) End() { e.s.end() }

// Cwd is where its shell was last seen.
func (e *Elsewhere) Cwd() string { return e.s.info().Cwd }
