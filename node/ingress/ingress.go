// SPDX-License-Identifier: Apache-2.0

package ingress

import (
	"context"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"time"

	"opensandbox.io/node/forward"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// perSandbox is how many requests to one sandbox may be under way: so that none takes the descriptors of all.
const perSandbox = 1024

// Config is what one ingress needs.
type Config struct {
	// RunDir holds <id>/{api,ports} of every sandbox.
	RunDir string
	// EndedDir is the name of a directory in RunDir with a wire.NodeEnd in <id> for each sandbox that has ended and is
	// not deleted. May be empty.
	EndedDir string
	// Loopback: it listens only on this machine. Then only names of this machine are asked for, and every port of a
	// sandbox is open; elsewhere only execd's is, which asks for its token.
	Loopback bool
	// PerSandbox bounds the requests to one sandbox that are under way; 0 is the default.
	PerSandbox int
	Log        *slog.Logger
}

// New makes the handler of all requests.
func New(config Config) (http.Handler, error) {
	dialer, err := newDialer(config.RunDir, config.EndedDir)
	if err != nil {
		return nil, err
	}
	if config.PerSandbox == 0 {
		config.PerSandbox = perSandbox
	}
	in := &ingress{loopback: config.Loopback, dialer: dialer, most: config.PerSandbox, underWay: map[string]int{}}
	in.proxy = forward.New(forward.Config{
		Rewrite: rewrite, Modify: modify, Explain: in.explain, Refuse: refuse, Transport: newTransports(dialer),
	})
	return reply.Handle(in, config.Log, wire.CodeGeneralUnknownError), nil
}

// Server is how a handler is served: no limit on a whole request or answer, because streams and uploads last as long
// as they last, but on headers and on idle connections.
func Server(handler http.Handler) *http.Server {
	return &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: forward.HeadersMax,
		ErrorLog: log.New(io.Discard, "", 0), // what broken clients do is no event either
	}
}

// transports keeps connections to execd longer than those to programs, which may close theirs at any time: a request
// that cannot be repeated must not meet one that is just being closed.
type transports struct{ execd, programs *http.Transport }

func newTransports(dialer *dialer) *transports {
	return &transports{execd: forward.NewTransport(dialer.dial, time.Minute), programs: forward.NewTransport(dialer.dial, time.Second)}
}

func (t *transports) RoundTrip(r *http.Request) (*http.Response, error) {
	if routeOf(r).port == execdPort {
		return t.execd.RoundTrip(r)
	}
	return t.programs.RoundTrip(r)
}

type ingress struct {
	loopback bool
	dialer   *dialer
	proxy    *forward.Proxy
	most     int

	mu sync.Mutex
	// underWay counts requests by sandbox.
	underWay map[string]int
}

type routeKey struct{}

func routeOf(r *http.Request) route {
	to, _ := r.Context().Value(routeKey{}).(route)
	return to
}

func (in *ingress) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if in.loopback && !isLoopbackHost(r.Host) {
		refuse(w, r, reply.Errorf(wire.CodeForeignOrigin, "The Host header names another machine.").
			WithHint("Use the endpoint as it was given; it begins with 127.0.0.1, localhost or <sandbox id>-<port>.localhost."))
		return
	}
	to, err := findRoute(r)
	if err != nil {
		refuse(w, r, err)
		return
	}
	reply.Note(r, slog.String("sandbox", to.id), slog.Int("port", to.port))
	if err := in.guard(r, to); err != nil {
		refuse(w, r, err)
		return
	}
	if to.needsSlash(r) {
		w.Header().Set("Location", to.withSlash(r.URL))
		w.WriteHeader(http.StatusPermanentRedirect)
		return
	}
	if !in.begin(to.id) {
		w.Header().Set("Retry-After", "1")
		refuse(w, r, reply.Errorf(wire.CodeIngressBusy, "%d requests to this sandbox are under way.", in.most))
		return
	}
	defer in.end(to.id)
	in.proxy.Serve(w, r.WithContext(context.WithValue(r.Context(), routeKey{}, to)), to.way != byPath)
}

func (in *ingress) begin(id string) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.underWay[id] >= in.most {
		return false
	}
	in.underWay[id]++
	return true
}

func (in *ingress) end(id string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.underWay[id]--; in.underWay[id] == 0 {
		delete(in.underWay, id)
	}
}

// rewrite turns the client's request into the sandbox's.
func rewrite(p *httputil.ProxyRequest) {
	to := routeOf(p.In)
	out := p.Out
	out.URL.Host = to.address()
	out.URL.RawPath = to.rest
	out.URL.Path, _ = url.PathUnescape(to.rest) // it came out of a parsed URL
	out.Header.Del(routeHeader)
	p.SetXForwarded()
	if prefix := to.prefix(); prefix != "" {
		out.Header.Set("X-Forwarded-Prefix", prefix)
	}
	if to.port == execdPort {
		out.Header.Del("Open-Sandbox-Api-Key")
		out.Header.Set("X-Request-Id", reply.RequestID(p.In))
		if trace := reply.TraceParent(p.In); out.Header.Get("Traceparent") != trace {
			out.Header.Set("Traceparent", trace)
			out.Header.Del("Tracestate") // it belonged to the one that was not valid
		}
		return
	}
	forward.StripSecrets(out.Header)
}

// explain says what became of a sandbox that does not answer.
func (in *ingress) explain(r *http.Request, err error) *reply.Fault {
	to := routeOf(r)
	if fault := in.dialer.ended(to.id); fault != nil {
		return fault
	}
	if to.port == execdPort {
		return reply.Errorf(wire.CodeBackendResponseFailed, "The sandbox broke off the connection: %s.", forward.Short(err)).
			WithHint("Ask the server for the sandbox's state.")
	}
	return reply.Errorf(wire.CodeBackendResponseFailed, "The server on port %d of the sandbox broke off the connection: %s.",
		to.port, forward.Short(err))
}
