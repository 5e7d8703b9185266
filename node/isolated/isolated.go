// SPDX-License-Identifier: Apache-2.0

// Package isolated runs shells that see the sandbox read-only, except for what their session was given, and whose
// changes can be looked at before they become the sandbox's (/v1/isolated of spec/execd.yaml).
//
// A session is a set of namespaces: user, mount, pid, ipc, uts and mostly network. execd, which has no right to mount
// anything in the sandbox, starts a copy of itself in a user namespace of its own, where that copy has every right and
// outside of it none. The copy builds the session's root (see build), gives up all of its rights, and stays as the first
// process of the pid namespace: when it is killed, the kernel kills all others, however fast they fork. Shells are
// started by execd, which enters the namespaces for that (see spawn.Inside), without capabilities, with
// no-new-privileges and the strict filter.
//
// What the session changes in an overlay lies in memory that is counted to the sandbox, where only execd sees it.
package isolated

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/session"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

const (
	// NamespacesMax is how many namespaces of each kind execd may make: for sessions that are there and some that the
	// kernel has not taken down yet.
	NamespacesMax = 4 * sessionsMax

	sessionsMax = 16
	// keepMax is how many sessions that ended by themselves are remembered.
	keepMax = 64
	bodyMax = 8 << 20
	// buildTime is more than building takes on any machine.
	buildTime = 20 * time.Second
	// memoryUsual is for files in memory where the sandbox has no limit.
	memoryUsual = 1 << 30
)

// extension is how a sandbox is made for this.
const extension = "bootstrap.execd.isolation"

// Meter is what the sandbox's cgroup counts.
type Meter interface {
	Read() (cgroup.Usage, error)
}

// API is the isolated sessions of a sandbox. Nothing is allocated before the first.
type API struct {
	Spawner *spawn.Spawner
	Runner  *command.Runner
	Shells  *session.API
	Meter   Meter // nil: the sandbox has no limits
	Log     *slog.Logger
	Version string

	usersMu sync.Mutex
	users   *os.File // the sessions' user namespace

	mu       sync.Mutex
	able     bool // a session has been built
	sessions map[string]*isolate
	making   int
	closed   bool
}

// Routes adds the API.
func (a *API) Routes(mux *http.ServeMux) {
	for pattern, handle := range map[string]func(http.ResponseWriter, *http.Request) error{
		"GET /v1/isolated/capabilities": a.serveCapabilities,
		"GET /v1/isolated/sessions":     a.serveList,
		"POST /v1/isolated/session":     a.serveCreate,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := handle(w, r); err != nil {
				reply.Error(w, r, err)
			}
		})
	}
	// Each path of files and directories: the session's first process knows which there are.
	const session = "/v1/isolated/session/{session_id}"
	for pattern, handle := range map[string]func(*isolate, http.ResponseWriter, *http.Request) error{
		"GET /v1/isolated/session/{session_id}":                    (*isolate).serveGet,
		"DELETE /v1/isolated/session/{session_id}":                 (*isolate).serveDelete,
		"POST /v1/isolated/session/{session_id}/run":               (*isolate).serveRun,
		"GET /v1/isolated/session/{session_id}/runs/{run_id}":      (*isolate).serveStatus,
		"GET /v1/isolated/session/{session_id}/runs/{run_id}/logs": (*isolate).serveLogs,
		"GET /v1/isolated/session/{session_id}/diff":               (*isolate).serveDiff,
		"POST /v1/isolated/session/{session_id}/commit":            (*isolate).serveCommit,
		session + "/files":                 (*isolate).serveFiles,
		session + "/files/{rest...}":       (*isolate).serveFiles,
		session + "/directories":           (*isolate).serveFiles,
		session + "/directories/{rest...}": (*isolate).serveFiles,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			s, err := a.find(r.PathValue("session_id"))
			if err == nil {
				err = handle(s, w, r)
			}
			if err != nil {
				reply.Error(w, r, err)
			}
		})
	}
}

func notFound(id string) *reply.Fault {
	return reply.Errorf(wire.CodeContextNotFound, "There is no isolated session %.64q.", id).
		WithHint("GET /v1/isolated/sessions lists those that exist.")
}

// find gives a session, or says that none can be here.
func (a *API) find(id string) (*isolate, error) {
	a.mu.Lock()
	s := a.sessions[id]
	a.mu.Unlock()
	if s != nil {
		return s, nil
	}
	if err := a.probe(); err != nil {
		return nil, err
	}
	return nil, notFound(id)
}

// possible refuses sandboxes with one user, which is what rootless ones have. To the kernel the owner of a user namespace
// is every process of the user that made it, with all rights in it: each command of such a sandbox could take over what
// builds a session.
func possible() error {
	if exists("/proc/self/uid_map", 1) {
		return nil
	}
	return unavailable("it is rootless and has one user, so a session could not be kept apart from other programs.").
		WithHint("Run opensandbox-server as root, and create the sandbox with the extension %s=enable.", extension)
}

// unavailable is a refusal in the published way.
func unavailable(why string) *reply.Fault {
	f := reply.Errorf(wire.CodeNotSupported, "Isolated runs are not possible in this sandbox: %s", why)
	f.Status = http.StatusServiceUnavailable
	return f.WithHint("Create the sandbox with the extension %s=enable, on a machine that allows nested user namespaces.", extension)
}

// probe builds a session for nothing, until that has worked once.
func (a *API) probe() error {
	a.mu.Lock()
	able := a.able
	a.mu.Unlock()
	if able {
		return nil
	}
	place := "/etc"
	if _, err := os.Stat(place); err != nil {
		place = "/usr"
	}
	s, err := a.build(&plan{setup: setup{Mounts: []mount{{place, place, overlay}}, PrivateTmp: true, Network: true, Bytes: 1 << 20}})
	if err != nil {
		return err
	}
	s.end()
	return nil
}

func (a *API) serveCapabilities(w http.ResponseWriter, _ *http.Request) error {
	yes, no := true, false
	answer := wire.IsolatedCapabilities{
		Available: true, Isolator: "opensandbox", Version: a.Version,
		SetprivAvailable: &yes, UsernsAvailable: &no, CommitSupported: &yes, DiffSupported: &yes,
	}
	if err := a.probe(); err != nil {
		var f *reply.Fault
		if !errors.As(err, &f) {
			return err
		}
		answer = wire.IsolatedCapabilities{
			Isolator: "opensandbox", Version: a.Version, Message: f.Message + " " + f.Hint,
			SetprivAvailable: &no, UsernsAvailable: &no, CommitSupported: &no, DiffSupported: &no,
		}
	}
	layer := func(state wire.IsolatedHardeningLayerState, message string) *wire.IsolatedHardeningLayer {
		return &wire.IsolatedHardeningLayer{State: state, Message: message}
	}
	active := wire.IsolatedHardeningLayerStateActive
	answer.Hardening = &wire.IsolatedHardening{
		InitMode: wire.IsolatedHardeningInitModeSubreaper, SignalShield: &no,
		CapDrop: layer(active, "no capabilities, no-new-privileges"), Seccomp: layer(active, "strict"),
		Landlock: layer(wire.IsolatedHardeningLayerStateDisabled, "mount namespaces do it"),
		Ebpf:     layer(wire.IsolatedHardeningLayerStateUnsupported, "there is no observer"),
	}
	if os.Getpid() == 1 {
		answer.Hardening.InitMode, answer.Hardening.SignalShield = wire.IsolatedHardeningInitModePid1, &yes
	}
	if !answer.Available {
		answer.Hardening.CapDrop, answer.Hardening.Seccomp = nil, nil
	}
	reply.JSON(w, http.StatusOK, answer)
	return nil
}

func (a *API) serveList(w http.ResponseWriter, _ *http.Request) error {
	if err := a.probe(); err != nil {
		return err
	}
	list := wire.IsolatedSessionList{Sessions: []wire.IsolatedSessionSummary{}}
	for _, s := range a.all() {
		info := s.info()
		last := info.LastRunAt
		if last.IsZero() {
			last = info.CreatedAt
		}
		list.Sessions = append(list.Sessions, wire.IsolatedSessionSummary{
			SessionID: s.id, Status: wire.IsolatedSessionSummaryStatus(info.Status), CreatedAt: info.CreatedAt,
			LastRunAt: last, IdleRemainingSeconds: info.IdleRemainingSeconds,
		})
	}
	reply.JSON(w, http.StatusOK, list)
	return nil
}

// all gives the sessions, the oldest first.
func (a *API) all() []*isolate {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := make([]*isolate, 0, len(a.sessions))
	for _, s := range a.sessions {
		all = append(all, s)
	}
	slices.SortFunc(all, func(x, y *isolate) int { return x.created.Compare(y.created) })
	return all
}

func (a *API) serveCreate(w http.ResponseWriter, r *http.Request) error {
	if err := possible(); err != nil {
		return err
	}
	var body wire.CreateIsolatedSessionRequest
	if err := reply.Decode(w, r, &body, bodyMax, wire.CodeInvalidRequestBody); err != nil {
		return err
	}
	p, err := a.check(&body)
	if err != nil {
		return err
	}
	s, err := a.create(p)
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusCreated, s.info())
	return nil
}

func (a *API) create(p *plan) (*isolate, error) {
	a.mu.Lock()
	alive := a.making
	for _, s := range a.sessions {
		if s.status() != wire.IsolatedSessionStatusDestroyed {
			alive++
		}
	}
	switch {
	case a.closed:
		a.mu.Unlock()
		return nil, reply.Errorf(wire.CodeRuntimeError, "The sandbox is ending.")
	case alive >= sessionsMax:
		a.mu.Unlock()
		return nil, reply.Errorf(wire.CodeResourceExhausted, "There are %d isolated sessions, more are not possible.", sessionsMax).
			WithHint("Delete one that is not needed any more, or give them an idle_timeout_seconds.")
	}
	a.making++
	a.mu.Unlock()
	s, err := a.build(p)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.making--
	if err != nil {
		return nil, err
	}
	if a.closed {
		go s.end()
		return nil, reply.Errorf(wire.CodeRuntimeError, "The sandbox is ending.")
	}
	if a.sessions == nil {
		a.sessions = map[string]*isolate{}
	}
	a.forgetSome()
	a.sessions[s.id] = s
	s.rest()
	return s, nil
}

// forgetSome drops the oldest of the sessions that ended by themselves. The lock is held.
func (a *API) forgetSome() {
	for len(a.sessions) >= sessionsMax+keepMax {
		var oldest *isolate
		for _, s := range a.sessions {
			if s.status() == wire.IsolatedSessionStatusDestroyed && (oldest == nil || s.created.Before(oldest.created)) {
				oldest = s
			}
		}
		if oldest == nil {
			return
		}
		delete(a.sessions, oldest.id)
	}
}

// memory is what a session may hold in files in memory: half of the limit, so that they alone do not exhaust it.
func (a *API) memory() int64 {
	if a.Meter != nil {
		if u, err := a.Meter.Read(); err == nil && u.MemoryLimit > 0 {
			return u.MemoryLimit / 2
		}
	}
	return memoryUsual
}

// newID is a random UUID; published clients insist on one.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// Close ends all sessions and refuses new ones. It waits as long as ctx allows.
func (a *API) Close(ctx context.Context) error {
	a.mu.Lock()
	a.closed = true
	all := a.sessions
	a.sessions = nil
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

// startProblem says why the first process could not be started.
func startProblem(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC):
		if limit, err := os.ReadFile("/proc/sys/user/max_user_namespaces"); err == nil && strings.TrimSpace(string(limit)) == "0" {
			return unavailable("it was created without the extension " + extension + ".")
		}
		return unavailable("all namespaces that it may have are in use.")
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EUSERS), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EINVAL):
		return unavailable(fmt.Sprintf("it may not make user namespaces (%v).", err))
	}
	return reply.Errorf(wire.CodeRuntimeError, "The session cannot be started: %s", command.StartFailed("its first process", err).Message)
}
