// SPDX-License-Identifier: Apache-2.0

// Package httpproxy serves execd's `/proxy/{port}/{path}`: any HTTP request, to a program that listens on the sandbox's
// own loopback. It is the way to a port for whoever holds execd's token and nothing else.
package httpproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/forward"
	"opensandbox.io/node/portproxy"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// Root is where this part of the API begins. It is no pattern of the mux, which would clean paths that are the
// programs' own.
const Root = "/proxy/"

// underWayMax bounds the requests that are under way: each holds buffers and descriptors of execd.
const underWayMax = 512

// API passes requests on. The zero value works; nothing is allocated before the first request.
type API struct {
	// Refused are ports that are never dialled: execd's own.
	Refused []int

	mu        sync.Mutex
	proxy     *forward.Proxy
	transport *http.Transport
	requests  map[*request]struct{}
	closed    bool
	served    sync.WaitGroup
}

// request is one that is under way.
type request struct {
	port   int
	prefix string // what the client wrote before rest
	rest   string // what the program sees, still escaped as the client wrote it
	cancel context.CancelFunc
}

type requestKey struct{}

// Before serves what is below Root and leaves everything else to next.
func (a *API) Before(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tail, ok := strings.CutPrefix(r.URL.EscapedPath(), Root)
		if !ok {
			next.ServeHTTP(w, r)
			return
		}
		if err := a.serve(w, r, tail); err != nil {
			reply.Error(w, r, err)
		}
	})
}

func (a *API) serve(w http.ResponseWriter, r *http.Request, tail string) error {
	number, rest, slash := strings.Cut(tail, "/")
	port, ok := portproxy.ParsePort(number)
	switch {
	case r.Method == http.MethodConnect:
		return reply.Errorf(wire.CodeGeneralMethodNotAllowed, "This is no forward proxy: CONNECT means nothing here.").
			WithHint("Send requests to the path itself; WebSocket and other upgrades work there.")
	case !ok:
		return reply.Errorf(wire.CodeInvalidPort, "The path has no port from 1 to 65535 behind %s.", Root)
	case slices.Contains(a.Refused, port):
		return reply.Errorf(wire.CodePortRefused, "Port %d belongs to the sandbox's daemon.", port)
	case !slash && r.Header.Get("Upgrade") == "" && (r.Method == http.MethodGet || r.Method == http.MethodHead):
		// Links of a program's page are relative to its root, and this redirection to the path, whatever is before it.
		location := number + "/"
		if r.URL.RawQuery != "" {
			location += "?" + r.URL.RawQuery
		}
		w.Header().Set("Location", location)
		w.WriteHeader(http.StatusPermanentRedirect)
		return nil
	}
	to := &request{port: port, prefix: prefixBefore(r) + Root + number, rest: "/" + rest}
	ctx, cancel := context.WithCancel(context.WithValue(r.Context(), requestKey{}, to))
	defer cancel()
	to.cancel = cancel
	proxy, err := a.begin(to)
	if err != nil {
		return err
	}
	defer a.end(to)
	proxy.Serve(w, r.WithContext(ctx), true)
	return nil
}

func (a *API) begin(to *request) (*forward.Proxy, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.closed:
		return nil, reply.Errorf(wire.CodeRuntimeError, "The sandbox is ending.")
	case len(a.requests) >= underWayMax:
		return nil, reply.Errorf(wire.CodeResourceExhausted, "%d requests to programs of this sandbox are under way.", underWayMax).
			WithHint("End some, or try again later.")
	}
	if a.proxy == nil {
		// A program may close an idle connection at any time, and a request that cannot be repeated must not meet one
		// that is just being closed: they are kept for a moment only.
		a.transport = forward.NewTransport(dial, time.Second)
		a.proxy = forward.New(forward.Config{Rewrite: rewrite, Modify: modify, Explain: explain, Refuse: reply.Error, Transport: a.transport})
		a.requests = map[*request]struct{}{}
	}
	a.requests[to] = struct{}{}
	a.served.Add(1)
	return a.proxy, nil
}

func (a *API) end(to *request) {
	a.mu.Lock()
	delete(a.requests, to)
	a.mu.Unlock()
	a.served.Done()
}

// Close refuses new requests, ends those under way and waits for them, but not longer than ctx allows. The server knows
// nothing of upgraded connections any more and could not do it.
func (a *API) Close(ctx context.Context) error {
	a.mu.Lock()
	a.closed = true
	for to := range a.requests {
		to.cancel()
	}
	transport := a.transport
	a.mu.Unlock()
	if transport == nil {
		return nil
	}
	gone := make(chan struct{})
	go func() {
		a.served.Wait()
		transport.CloseIdleConnections()
		close(gone)
	}()
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func requestOf(r *http.Request) *request {
	to, _ := r.Context().Value(requestKey{}).(*request)
	return to
}

// dial is http.Transport's DialContext: address is what rewrite made.
func dial(ctx context.Context, _, address string) (net.Conn, error) {
	_, number, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, ok := portproxy.ParsePort(number)
	if !ok {
		return nil, fmt.Errorf("not a port: %q", number)
	}
	conn, err := portproxy.Dial(ctx, port)
	switch {
	case err == nil:
		return conn, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, unix.ECONNREFUSED):
		return nil, reply.Errorf(wire.CodePortClosed, "Nothing listens on port %d inside the sandbox.", port)
	}
	return nil, reply.Errorf(wire.CodePortClosed, "Port %d inside the sandbox cannot be reached: %s.", port, forward.Short(err))
}

// rewrite turns the client's request into the program's.
func rewrite(p *httputil.ProxyRequest) {
	to := requestOf(p.In)
	out := p.Out
	out.URL.Host = "loopback:" + strconv.Itoa(to.port)
	out.URL.RawPath = to.rest
	out.URL.Path, _ = url.PathUnescape(to.rest) // it came out of a parsed URL
	forward.StripSecrets(out.Header)
	p.SetXForwarded()
	if trusted(p.In) {
		// Before the socket there is only ingress, or the server, and they have said it better.
		for _, name := range []string{"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
			if said := p.In.Header[name]; len(said) > 0 {
				out.Header[name] = said
			}
		}
	}
	out.Header.Set("X-Forwarded-Prefix", to.prefix)
}

// trusted tells whether a request came by way of our own parts: only they get to a Unix socket. On TCP it is the client
// itself that could say anything about the way.
func trusted(r *http.Request) bool {
	address, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	_, unixSocket := address.(*net.UnixAddr)
	return unixSocket
}

// prefixBefore is what was taken off the path before it came here. It goes into addresses of the answer, so only what
// can be nothing else but a path is taken.
func prefixBefore(r *http.Request) string {
	said := r.Header.Values("X-Forwarded-Prefix")
	if !trusted(r) || len(said) != 1 || !strings.HasPrefix(said[0], "/") || strings.HasPrefix(said[0], "//") {
		return ""
	}
	for _, c := range []byte(said[0]) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && !strings.ContainsRune("/-._~", rune(c)) {
			return ""
		}
	}
	return strings.TrimSuffix(said[0], "/")
}

// modify makes the answer fit below the path: all programs share the address of execd.
func modify(answer *http.Response) error {
	forward.FitBelow(answer, requestOf(answer.Request).prefix)
	return nil
}

func explain(r *http.Request, err error) *reply.Fault {
	return reply.Errorf(wire.CodeBackendResponseFailed, "The program on port %d broke off the connection: %s.", requestOf(r).port, forward.Short(err)).
		WithHint("It may not speak HTTP, or it ended; look at its output.")
}
