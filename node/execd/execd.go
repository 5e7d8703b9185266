// SPDX-License-Identifier: Apache-2.0

// Package execd is the daemon in a sandbox: it runs the entry point as its child and serves the API of
// spec/execd.yaml to whoever holds the sandbox's token.
package execd

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/code"
	"opensandbox.io/node/command"
	"opensandbox.io/node/file"
	"opensandbox.io/node/httpproxy"
	"opensandbox.io/node/isolated"
	"opensandbox.io/node/metric"
	"opensandbox.io/node/portproxy"
	"opensandbox.io/node/pty"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/session"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

// Protocol is the version of what execd and the server say to each other; it goes up when an old server could not
// speak to a new execd any more.
const Protocol = 1

// apiPort is the published port of this API; nobody reaches it through the ports proxy.
const apiPort = 44772

// leaveTime is how long answers that are on their way get when the sandbox ends.
const leaveTime = 500 * time.Millisecond

// Config is everything execd gets; it reads no environment and no flags.
type Config struct {
	API   net.Listener
	Ports net.Listener // may be nil

	TokenSHA256 [32]byte
	Spool       *os.File // a directory that the sandbox cannot reach
	End         *os.File // gets the end as JSON; may be nil

	Env        []string // default environment of entry point and commands
	Cwd        string   // their default directory; empty: /
	Entrypoint []string // empty: none, serve until the context ends

	Confinement spawn.Confinement
	Meter       Meter // nil: figures of the machine

	// Signals are passed on to the entry point as they come; may be nil.
	Signals <-chan os.Signal

	Ready   func(pid int) // called when it serves and the entry point is started
	Log     *slog.Logger
	Version string
}

// Meter is what the sandbox's cgroup counts.
type Meter interface {
	Read() (cgroup.Usage, error)
}

// End is how the sandbox's main process ended.
type End = wire.NodeEnd

// Task is what one execd is for: the part of a Config that comes with a request.
type Task struct {
	TokenSHA256 [32]byte
	End         *os.File
	Env         []string
	Cwd         string
	Entrypoint  []string
}

// Run serves until the entry point ends, or ends it when ctx does, and says how it ended. When it returns, no
// process it has started runs any more as far as it can tell; as pid 1 the caller exits, and then none does.
func Run(ctx context.Context, c Config) (End, error) {
	task := Task{TokenSHA256: c.TokenSHA256, End: c.End, Env: c.Env, Cwd: c.Cwd, Entrypoint: c.Entrypoint}
	p, err := Prepare(c)
	if err != nil {
		return c.notStarted(err)
	}
	return p.Run(ctx, task)
}

// Prepared is an execd that does not know yet what it is for.
type Prepared struct{ daemon *daemon }

// Prepare does what needs no Task: the thread that forks, the spool, the routes.
func Prepare(c Config) (*Prepared, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	// Files made for callers get the modes they ask for, whatever the daemon was started with.
	unix.Umask(0o022)
	d := &daemon{Config: &c, failed: make(chan error, 2)}
	var err error
	if d.spawner, err = spawn.New(c.Confinement); err != nil {
		return nil, err
	}
	var meter command.Meter
	if c.Meter != nil {
		meter = c.Meter
	}
	d.runner, err = command.NewRunner(command.Config{Spawner: d.spawner, Spool: c.Spool, Meter: meter, Log: c.Log})
	if err != nil {
		d.spawner.Close()
		return nil, err
	}
	d.files = file.New(nil, "/")
	d.sessions = &session.API{Spawner: d.spawner, Runner: d.runner, Log: c.Log}
	d.terminals = &pty.API{Spawner: d.spawner, Runner: d.runner, Log: c.Log}
	d.isolated = &isolated.API{Spawner: d.spawner, Runner: d.runner, Shells: d.sessions, Log: c.Log, Version: c.Version}
	if c.Meter != nil {
		d.isolated.Meter = c.Meter
	}
	d.cells = &code.API{Spawner: d.spawner, Runner: d.runner, Log: c.Log}
	d.programs = &httpproxy.API{Refused: ownPorts(c.API, c.Ports)}
	d.server = &http.Server{
		Handler:           d.handler(),
		ReadHeaderTimeout: 20 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(d.Log.Handler(), slog.LevelDebug),
	}
	warm(d.server)
	return &Prepared{d}, nil
}

// Run is Run for an execd that was prepared; once only.
func (p *Prepared) Run(ctx context.Context, t Task) (End, error) {
	d := p.daemon
	d.TokenSHA256, d.End, d.Cwd, d.Entrypoint = t.TokenSHA256, t.End, t.Cwd, t.Entrypoint
	if d.Cwd == "" {
		d.Cwd = "/"
	}
	d.Env = withDefaults(t.Env)
	d.runner.Env, d.runner.Cwd = d.Env, d.Cwd
	*d.files = *file.New(d.Env, d.Cwd)
	if err := d.start(); err != nil {
		return d.notStarted(err)
	}
	end := d.wait(ctx)
	d.stop()
	return end, d.writeEnd(end)
}

// notStarted is the end of an execd that never served.
func (c *Config) notStarted(err error) (End, error) {
	end := End{Reason: wire.NodeEndReasonStartFailed, Message: err.Error(), At: time.Now().UTC()}
	return end, errors.Join(err, c.writeEnd(end))
}

// daemon is a running execd.
type daemon struct {
	*Config
	spawner   *spawn.Spawner
	runner    *command.Runner
	sessions  *session.API
	terminals *pty.API
	isolated  *isolated.API
	cells     *code.API
	files     *file.API
	programs  *httpproxy.API
	gauge     *metric.Gauge
	server    *http.Server
	ports     *portproxy.Proxy
	entry     *command.Command // nil without an entry point
	failed    chan error       // a listener broke
}

// start runs the entry point and serves.
func (d *daemon) start() error {
	if len(d.Entrypoint) > 0 {
		var err error
		d.entry, err = d.runner.RunEntrypoint(d.Entrypoint)
		if err == nil && d.entry.Pid() == 0 {
			err = errors.New(d.entry.Record().End.Message)
		}
		if err != nil {
			d.stop()
			return fmt.Errorf("entry point: %w", err)
		}
	}
	d.serve()
	if d.Ready != nil {
		pid := 0
		if d.entry != nil {
			pid = d.entry.Pid()
		}
		d.Ready(pid)
	}
	if code.IsEntrypoint(d.Entrypoint) {
		d.cells.Warm() // when nobody waits for this sandbox any more
	}
	return nil
}

// withDefaults adds what published clients expect in every command's environment: the file to which their set_env
// appends is named there.
func withDefaults(env []string) []string {
	for _, pair := range env {
		if strings.HasPrefix(pair, "EXECD_ENVS=") {
			return env
		}
	}
	return append(env[:len(env):len(env)], "EXECD_ENVS=/opt/opensandbox/.env")
}

func (d *daemon) serve() {
	go func() {
		if err := d.server.Serve(d.API); !errors.Is(err, http.ErrServerClosed) {
			d.failed <- fmt.Errorf("api: %w", err)
		}
	}()
	if d.Ports == nil {
		return
	}
	d.ports = &portproxy.Proxy{Refused: ownPorts(d.API, d.Ports), Log: d.Log}
	go func() {
		if err := d.ports.Serve(d.Ports); err != nil {
			d.failed <- fmt.Errorf("ports: %w", err)
		}
	}()
}

// ownPorts are those no proxy must reach: the published one, and ours where we listen on TCP.
func ownPorts(listeners ...net.Listener) []int {
	ports := []int{apiPort}
	for _, l := range listeners {
		if l == nil {
			continue
		}
		if a, ok := l.Addr().(*net.TCPAddr); ok {
			ports = append(ports, a.Port)
		}
	}
	return ports
}

// handler puts the API together.
func (d *daemon) handler() http.Handler {
	var gauge metric.Meter
	if d.Meter != nil {
		gauge = d.Meter
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ping", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		reply.JSON(w, http.StatusOK, wire.ExecdVersion{Protocol: Protocol, Version: d.Version})
	})
	d.runner.Routes(mux)
	d.sessions.Routes(mux)
	d.terminals.Routes(mux)
	d.isolated.Routes(mux)
	d.cells.Routes(mux)
	d.files.Routes(mux)
	d.gauge = metric.New(gauge)
	d.gauge.Routes(mux)
	return reply.Handle(d.authenticate(d.programs.Before(route(mux))), d.Log, wire.CodeUnknown)
}

// authenticate lets nobody in without the token, to no route. Digests are compared, so the time it takes says
// nothing, and the daemon does not hold what it could leak.
func (d *daemon) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sum := sha256.Sum256([]byte(r.Header.Get("X-EXECD-ACCESS-TOKEN")))
		if subtle.ConstantTimeCompare(sum[:], d.TokenSHA256[:]) != 1 {
			reply.Error(w, r, reply.Errorf(wire.CodeUnauthorized, "The access token is missing or wrong."))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// route answers in the contract's shape where the mux would answer with plain text.
func route(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler, pattern := mux.Handler(r)
		if pattern != "" {
			if err := checkQuery(pattern, r); err != nil {
				reply.Error(w, r, err)
				return
			}
			mux.ServeHTTP(w, r) // sets the path values, which the bare handler does not
			return
		}
		probe := &discard{header: http.Header{}}
		handler.ServeHTTP(probe, r)
		if allow := probe.header.Get("Allow"); allow != "" {
			w.Header().Set("Allow", allow)
			reply.Error(w, r, reply.Errorf(wire.CodeGeneralMethodNotAllowed, "%s is not a method of %s.", r.Method, r.URL.Path).
				WithHint("Allowed: %s.", allow))
			return
		}
		reply.Error(w, r, reply.Errorf(wire.CodeGeneralNotFound, "There is no route %s.", r.URL.Path).
			WithHint("See the execd API of this version; it may be one that this sandbox does not have yet."))
	})
}

// discard is a ResponseWriter that only keeps headers.
type discard struct{ header http.Header }

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }
func (d *discard) WriteHeader(int)             {}

// wait waits for the end of the entry point.
func (d *daemon) wait(ctx context.Context) End {
	var done <-chan struct{} // for ever without an entry point
	if d.entry != nil {
		done = d.entry.Done()
	}
	for {
		select {
		case <-done:
		case received := <-d.Signals:
			if number, ok := received.(syscall.Signal); ok && d.entry != nil {
				d.entry.Signal(number)
			}
			continue
		case err := <-d.failed:
			d.Log.Error("serving", "error", err)
			return d.finish(End{Reason: wire.NodeEndReasonLost, Message: err.Error()})
		case <-ctx.Done():
			if d.entry == nil {
				return d.finish(End{Reason: wire.NodeEndReasonKilled, Message: "It was told to end."})
			}
			d.runner.Terminate(d.entry)
		}
		return d.finish(nodeEnd(d.entry.Record().End))
	}
}

// PassedOn are the signals that pid 1 gets on behalf of the entry point, which whoever sends them means.
var PassedOn = []os.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2}

func (d *daemon) finish(end End) End {
	end.At = time.Now().UTC()
	if d.Meter != nil {
		if u, err := d.Meter.Read(); err == nil && u.MemoryPeak > 0 {
			end.PeakMemoryBytes = &u.MemoryPeak
		}
	}
	return end
}

// nodeEnd is the end of the entry point as the node reports it.
func nodeEnd(e *wire.CommandEnd) End {
	end := End{ExitCode: e.ExitCode, Signal: e.Signal, Message: e.Message}
	switch e.Reason {
	case wire.CommandEndReasonExited:
		end.Reason = wire.NodeEndReasonExited
	case wire.CommandEndReasonSignalled:
		end.Reason = wire.NodeEndReasonSignalled
	case wire.CommandEndReasonOutOfMemory:
		end.Reason = wire.NodeEndReasonOutOfMemory
	case wire.CommandEndReasonKilled, wire.CommandEndReasonTimedOut:
		end.Reason = wire.NodeEndReasonKilled
	case wire.CommandEndReasonStartFailed:
		end.Reason = wire.NodeEndReasonStartFailed
	default:
		end.Reason = wire.NodeEndReasonLost
	}
	return end
}

// stop ends what still runs, so that clients in the middle of a command learn how it ended, and then the server.
func (d *daemon) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	if d.Ports != nil {
		_ = d.Ports.Close()
	}
	d.gauge.Close()
	// First those whose runs the runner records.
	if err := errors.Join(d.isolated.Close(ctx), d.terminals.Close(ctx), d.sessions.Close(ctx), d.cells.Close(ctx)); err != nil {
		d.Log.Warn("shells are left at the end", "error", err)
	}
	if err := d.programs.Close(ctx); err != nil {
		d.Log.Warn("requests to programs are left at the end", "error", err)
	}
	if err := d.runner.Close(ctx); err != nil {
		d.Log.Warn("commands are left at the end", "error", err)
	}
	if err := d.server.Shutdown(ctx); err != nil {
		_ = d.server.Close()
	}
	_ = d.API.Close() // which the server does not know before it serves
	if d.ports != nil {
		d.ports.Close()
	}
	d.spawner.Close()
}

// writeEnd stores the end where the node finds it, also when nobody is there to read it now.
func (c *Config) writeEnd(end End) error {
	if c.End == nil {
		return nil
	}
	data, err := json.Marshal(end)
	if err != nil {
		return err
	}
	if _, err := c.End.Write(append(data, '\n')); err != nil {
		return fmt.Errorf("writing the end: %w", err)
	}
	return nil
}
