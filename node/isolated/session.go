// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/command"
	"opensandbox.io/node/control"
	"opensandbox.io/node/forward"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/seccomp"
	"opensandbox.io/node/session"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

// isolate is one session.
type isolate struct {
	api     *API
	plan    *plan
	id      string
	created time.Time

	first *spawn.Process // of its pid namespace
	root  *os.File
	// namespaces is the way in; own are those of them that are only ours.
	namespaces, own []*os.File
	layers          []layer
	shell           *session.Elsewhere

	talk      sync.Mutex // one message at a time
	conn      *control.Conn
	transport *http.Transport
	files     *forward.Proxy

	mu       sync.Mutex
	active   int // runs
	lastRun  time.Time
	idle     *time.Timer
	deadline time.Time // of the timer
	runs     map[string]*background
	order    []string // of runs
	changing bool     // a commit is on
	ended    bool
	over     sync.Once
}

// layer is an overlay of which the changes are kept.
type layer struct {
	path         string
	upper, lower *os.File
}

// build makes the namespaces and what the session sees in them.
func (a *API) build(p *plan) (_ *isolate, err error) {
	if err := possible(); err != nil {
		return nil, err
	}
	s := &isolate{api: a, plan: p, id: newID(), created: time.Now().UTC().Truncate(time.Microsecond)}
	defer func() {
		if err != nil {
			s.end()
		}
	}()
	lowers := map[string]*os.File{}
	defer func() {
		for _, f := range lowers {
			_ = f.Close()
		}
	}()
	for _, path := range p.lasting {
		fd, err := openPath(unix.AT_FDCWD, path, unix.O_DIRECTORY)
		if err != nil {
			return nil, explain(refused(path, err))
		}
		lowers[path] = os.NewFile(uintptr(fd), path)
	}
	if p.request != nil {
		program, err := a.Runner.Program(&wire.RunCommandRequest{Argv: []string{"sh"}, Cwd: "/"})
		if err != nil {
			return nil, err
		}
		p.setup.Env = p.environment(program.Spec.Env)
		program.Close()
	}
	users, err := a.userNamespace()
	if err != nil {
		return nil, err
	}
	conn, theirs, err := control.Pair()
	if err != nil {
		return nil, err
	}
	s.conn = conn
	s.first, err = a.Spawner.Start(spawn.Spec{
		Path: "/proc/self/exe", Args: []string{firstName}, Extra: []*os.File{theirs}, Apart: &spawn.Apart{Users: users, Network: p.setup.Network},
	})
	_ = theirs.Close()
	if err != nil {
		return nil, startProblem(err)
	}
	files, err := s.ask()
	if err != nil {
		return nil, err
	}
	own := len(namespaceFiles(p.setup.Network))
	if len(files) < 1+own {
		return nil, errors.New("isolated: too few files came along")
	}
	s.root, s.own, files = files[0], files[1:1+own], files[1+own:]
	s.namespaces = append([]*os.File{users}, s.own...)
	for i := range p.setup.Mounts {
		m := &p.setup.Mounts[i]
		if m.How != overlay || len(files) == 0 {
			continue
		}
		if lower := lowers[m.Path]; lower != nil {
			s.layers = append(s.layers, layer{m.Path, files[0], lower})
			delete(lowers, m.Path)
		} else {
			_ = files[0].Close()
		}
		files = files[1:]
	}
	if a.Shells != nil {
		s.shell = a.Shells.NewElsewhere(s.id, p.setup.Cwd, s.program)
	}
	a.mu.Lock()
	a.able = true
	a.mu.Unlock()
	return s, nil
}

// userNamespace makes the one that all sessions share: nobody has rights in it once a session is built.
func (a *API) userNamespace() (*os.File, error) {
	a.usersMu.Lock()
	defer a.usersMu.Unlock()
	if a.users != nil {
		return a.users, nil
	}
	conn, theirs, err := control.Pair()
	if err != nil {
		return nil, err
	}
	proc, err := a.Spawner.Start(spawn.Spec{Path: "/proc/self/exe", Args: []string{usersName}, Extra: []*os.File{theirs}, Apart: &spawn.Apart{}})
	_ = theirs.Close()
	if err != nil {
		_ = conn.Close()
		return nil, startProblem(err)
	}
	defer func() {
		_ = conn.Close()
		_ = proc.Signal(unix.SIGKILL)
		<-proc.Done()
	}()
	_ = conn.Socket().SetDeadline(time.Now().Add(buildTime))
	if _, err := conn.Receive(&built{}); err != nil {
		return nil, unavailable("its user namespace did not come up: " + err.Error() + ".")
	}
	if err := spawn.MapUsers(proc.Pid); err != nil {
		return nil, unavailable("a nested user namespace may not have its users: " + err.Error() + ".")
	}
	a.users, err = os.Open("/proc/" + strconv.Itoa(proc.Pid) + "/ns/user")
	return a.users, err
}

// ask tells the first process what to build and waits until it has.
func (s *isolate) ask() ([]*os.File, error) {
	_ = s.conn.Socket().SetDeadline(time.Now().Add(buildTime))
	defer s.conn.Socket().SetDeadline(time.Time{})
	if err := s.conn.Send(&s.plan.setup); err != nil {
		return nil, unavailable("its first process ended at once: " + err.Error() + ".")
	}
	var answer built
	files, err := s.conn.Receive(&answer)
	switch {
	case err != nil:
		return nil, unavailable("its first process did not come up: " + err.Error() + ".")
	case answer.Hint != "":
		return nil, explain(&mistake{answer.Problem, answer.Hint})
	case answer.Problem != "":
		return nil, unavailable("its root could not be built: " + answer.Problem + ".")
	}
	return files, nil
}

// explain makes a mistake of the caller's an answer.
func explain(err error) error {
	var bad *mistake
	if errors.As(err, &bad) {
		return invalid("%s", bad.text).WithHint("%s", bad.hint)
	}
	return err
}

// program prepares a shell: that of a command, but inside, as the session's user and with its environment.
func (s *isolate) program(argv []string, cwd string) (*command.Program, error) {
	p, err := s.api.Runner.Program(&wire.RunCommandRequest{Argv: argv, Cwd: "/", UID: s.plan.request.UID, GID: s.plan.request.GID})
	if err != nil {
		return nil, err
	}
	// The sandbox's own directory would be a way out.
	p.Close()
	if p.Spec.Path == "" {
		return nil, os.ErrNotExist
	}
	if p.Spec.Dir, err = s.directory(cwd); err != nil {
		return nil, err
	}
	p.Cwd = cwd
	p.Spec.Env = s.plan.environment(p.Spec.Env)
	p.Spec.Credential = s.plan.credential
	filter, err := seccomp.Program(seccomp.Strict)
	if err != nil {
		p.Close()
		return nil, err
	}
	p.Spec.Inside = &spawn.Inside{Namespaces: s.namespaces, Filter: filter}
	return p, nil
}

// directory opens a directory as the session sees it; where it is gone, the root.
func (s *isolate) directory(path string) (*os.File, error) {
	for _, path := range []string{path, "/"} {
		how := unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		}
		if fd, err := unix.Openat2(int(s.root.Fd()), path, &how); err == nil {
			return os.NewFile(uintptr(fd), path), nil
		}
	}
	return nil, os.ErrNotExist
}

// end ends all processes of the session and gives everything back.
func (s *isolate) end() {
	s.over.Do(func() {
		s.mu.Lock()
		s.ended = true
		if s.idle != nil {
			s.idle.Stop()
		}
		s.mu.Unlock()
		if s.first != nil {
			// The kernel kills the others of its pid namespace, and waits for them.
			_ = s.first.Signal(unix.SIGKILL)
			<-s.first.Done()
		}
		if s.shell != nil {
			s.shell.End()
		}
		s.mu.Lock()
		runs := s.runs
		s.mu.Unlock()
		for _, b := range runs {
			<-b.finished
		}
		if s.transport != nil {
			s.transport.CloseIdleConnections()
		}
		if s.conn != nil {
			_ = s.conn.Close()
		}
		for _, l := range s.layers {
			_ = l.upper.Close()
			_ = l.lower.Close()
		}
		if s.root != nil {
			_ = s.root.Close()
		}
		for _, f := range s.own {
			_ = f.Close()
		}
	})
}

func (s *isolate) status() wire.IsolatedSessionStatus {
	s.mu.Lock()
	ended := s.ended
	s.mu.Unlock()
	if ended {
		return wire.IsolatedSessionStatusDestroyed
	}
	select {
	case <-s.first.Done():
		return wire.IsolatedSessionStatusDead
	default:
		return wire.IsolatedSessionStatusActive
	}
}

func (s *isolate) info() wire.IsolatedSession {
	r := s.plan.request
	info := wire.IsolatedSession{
		SessionID: s.id, Status: s.status(), CreatedAt: s.created, Profile: wire.IsolatedSessionProfile(r.Profile),
		Workspace: r.Workspace, Overlays: r.Overlays, ExtraWritable: r.ExtraWritable, Binds: r.Binds, ShareNet: r.ShareNet,
		EnvPassthrough: r.EnvPassthrough, UID: r.UID, GID: r.GID, UIDMode: wire.IsolatedSessionUIDMode(r.UIDMode),
		IdleTimeoutSeconds: r.IdleTimeoutSeconds,
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	info.LastRunAt = s.lastRun
	if s.plan.idle > 0 && !s.ended {
		left := s.plan.idle
		if s.active == 0 {
			left = max(0, time.Until(s.deadline))
		}
		seconds := int64(left / time.Second)
		info.IdleRemainingSeconds = &seconds
	}
	return info
}

func (s *isolate) serveGet(w http.ResponseWriter, _ *http.Request) error {
	reply.JSON(w, http.StatusOK, s.info())
	return nil
}

func (s *isolate) serveDelete(w http.ResponseWriter, _ *http.Request) error {
	s.api.mu.Lock()
	_, mine := s.api.sessions[s.id]
	delete(s.api.sessions, s.id)
	s.api.mu.Unlock()
	if !mine {
		return notFound(s.id)
	}
	s.end()
	w.WriteHeader(http.StatusOK)
	return nil
}

// usable says why nothing can be done with a session that is over.
func (s *isolate) usable() error {
	switch s.status() {
	case wire.IsolatedSessionStatusDestroyed:
		return reply.Errorf(wire.CodeContextNotFound, "The session was ended after %d idle seconds.", int64(s.plan.idle/time.Second)).
			WithHint("Create another one, with a longer idle_timeout_seconds or none.")
	case wire.IsolatedSessionStatusDead:
		return reply.Errorf(wire.CodeContextNotFound, "The session is dead: its first process was killed.").
			WithHint("The sandbox may have been out of memory. Delete the session and create another one.")
	}
	return nil
}

// begin counts a run. While one is on, the session is not idle.
func (s *isolate) begin() error {
	if err := s.usable(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.ended:
		return notFound(s.id)
	case s.changing:
		return reply.Errorf(wire.CodeSessionBusy, "The session's changes are just being committed.").WithHint("Try again.")
	}
	s.active++
	s.lastRun = time.Now().UTC().Truncate(time.Microsecond)
	if s.idle != nil {
		s.idle.Stop()
	}
	return nil
}

// done is the end of a run.
func (s *isolate) done() {
	s.mu.Lock()
	s.active--
	s.mu.Unlock()
	s.rest()
}

// rest starts the time after which an idle session ends.
func (s *isolate) rest() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.plan.idle == 0 || s.active > 0 || s.ended {
		return
	}
	s.deadline = time.Now().Add(s.plan.idle)
	if s.idle == nil {
		s.idle = time.AfterFunc(s.plan.idle, s.expire)
	} else {
		s.idle.Reset(s.plan.idle)
	}
}

func (s *isolate) expire() {
	s.mu.Lock()
	// A run may have begun, and even ended, since the timer fired.
	early := s.active > 0 || time.Now().Before(s.deadline) || s.changing
	s.mu.Unlock()
	if early {
		s.rest()
		return
	}
	s.end()
}

// serveFiles lets the first process answer, which sees what the session sees and may do no more.
func (s *isolate) serveFiles(w http.ResponseWriter, r *http.Request) error {
	if err := s.usable(); err != nil {
		return err
	}
	s.mu.Lock()
	if s.files == nil {
		s.transport = forward.NewTransport(s.dial, time.Second)
		s.files = forward.New(forward.Config{
			Transport: s.transport, Rewrite: s.rewrite, Refuse: reply.Error,
			Explain: func(_ *http.Request, err error) *reply.Fault {
				return reply.Errorf(wire.CodeRuntimeError, "The session does not answer: %s.", forward.Short(err))
			},
		})
	}
	files := s.files
	s.mu.Unlock()
	files.Serve(w, r, false)
	return nil
}

func (s *isolate) rewrite(p *httputil.ProxyRequest) {
	forward.StripSecrets(p.Out.Header)
	prefix := "/v1/isolated/session/" + s.id
	p.Out.URL.Host = s.id
	p.Out.URL.Path = strings.TrimPrefix(p.Out.URL.Path, prefix)
	p.Out.URL.RawPath = ""
}

// dial hands the first process one end of a connection.
func (s *isolate) dial(context.Context, string, string) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "files"), os.NewFile(uintptr(fds[1]), "files")
	defer ours.Close()
	defer theirs.Close()
	s.talk.Lock()
	err = s.conn.Send(serve{}, theirs)
	s.talk.Unlock()
	if err != nil {
		return nil, err
	}
	return net.FileConn(ours)
}
