// SPDX-License-Identifier: Apache-2.0

package ingress

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// pageSandbox keeps a page of one sandbox from acting as a page of another, or of anything else on this address:
// by path they all share one origin.
const pageSandbox = "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts"

// notForSandboxes are headers that a client may send to us but no program inside a sandbox may see.
var notForSandboxes = []string{"Open-Sandbox-Api-Key", "X-Execd-Access-Token"}

// Config is what one ingress needs.
type Config struct {
	// RunDir holds <id>/{api,ports} of every sandbox.
	RunDir string
	// Loopback: it listens only on this machine. Then only names of this machine are asked for, and every port of a
	// sandbox is open; elsewhere only execd's is, which asks for its token.
	Loopback bool
	Log      *slog.Logger
}

// New makes the handler of all requests.
func New(config Config) (http.Handler, error) {
	dialer, err := newDialer(config.RunDir)
	if err != nil {
		return nil, err
	}
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	in := &ingress{loopback: config.Loopback}
	in.proxy = &httputil.ReverseProxy{
		Rewrite:        rewrite,
		ModifyResponse: modify,
		ErrorHandler:   fail,
		FlushInterval:  -1, // a stream's event is worth nothing in a buffer
		ErrorLog:       log.New(discard{}, "", 0),
		Transport: &http.Transport{
			DialContext:         dialer.dial,
			DisableCompression:  true, // bytes pass as they are
			MaxIdleConnsPerHost: 8,
			IdleConnTimeout:     30 * time.Second,
		},
	}
	return reply.Handle(in, config.Log, wire.CodeGeneralUnknownError), nil
}

// discard takes what net/http would print: a client that leaves in the middle is no event, and the reasons of
// failed requests are in our own log.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

type ingress struct {
	loopback bool
	proxy    *httputil.ReverseProxy
}

type routeKey struct{}

func routeOf(r *http.Request) route {
	to, _ := r.Context().Value(routeKey{}).(route)
	return to
}

func (in *ingress) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if in.loopback && !isLoopbackHost(r) {
		reply.Error(w, r, reply.Errorf(wire.CodeForeignOrigin, "The Host header names another machine.").
			WithHint("Use the endpoint as it was given; it begins with 127.0.0.1 or localhost."))
		return
	}
	to, err := parsePath(r.URL)
	if err != nil {
		reply.Error(w, r, err)
		return
	}
	if to.port == egressPort {
		reply.Error(w, r, reply.Errorf(wire.CodeIngressNoEgress, "This sandbox has no way out to the network."))
		return
	}
	if !in.loopback && to.port != execdPort {
		reply.Error(w, r, reply.Errorf(wire.CodeIngressAccessRequired,
			"Port %d of the sandbox is not open to other machines.", to.port))
		return
	}
	// A server may answer before it has read everything; without this the rest of the request would be lost.
	_ = http.NewResponseController(w).EnableFullDuplex()
	in.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), routeKey{}, to)))
}

// rewrite turns the client's request into the sandbox's.
func rewrite(p *httputil.ProxyRequest) {
	to := routeOf(p.In)
	out := p.Out
	out.URL.Scheme, out.URL.Host = "http", to.address()
	out.URL.RawPath = to.rest
	out.URL.Path, _ = url.PathUnescape(to.rest) // it came out of a parsed URL
	out.URL.RawQuery = p.In.URL.RawQuery        // as it was, also where Go would not parse it
	out.Host = p.In.Host
	p.SetXForwarded()
	out.Header.Set("X-Forwarded-Prefix", to.prefix())
	if to.port == execdPort {
		out.Header.Del("Open-Sandbox-Api-Key")
		return
	}
	for _, name := range notForSandboxes {
		out.Header.Del(name)
	}
}

// modify makes the answer of a server that believes to be at the root fit below the route's prefix.
func modify(answer *http.Response) error {
	to := routeOf(answer.Request)
	if to.port == execdPort {
		return nil
	}
	header := answer.Header
	if location := header.Get("Location"); location != "" {
		header.Set("Location", below(to, answer.Request.Host, location))
	}
	// Cookies know no ports: without this one sandbox could set another's. One that cannot be parsed is dropped.
	cookies := answer.Cookies()
	header.Del("Set-Cookie")
	for _, cookie := range cookies {
		cookie.Domain = ""
		cookie.Path = to.prefix() + "/" + strings.TrimPrefix(cookie.Path, "/")
		header.Add("Set-Cookie", cookie.String())
	}
	header.Del("Clear-Site-Data") // it would clear every sandbox's
	// A second policy only narrows the server's own.
	header.Add("Content-Security-Policy", pageSandbox)
	return nil
}

// below puts a redirect that stays on this server under the route's prefix; others go where they go.
func below(to route, host, location string) string {
	u, err := url.Parse(location)
	if err != nil || u.Host != "" && u.Host != host || u.Host == "" && u.Scheme != "" {
		return location
	}
	if u.Host == "" && !strings.HasPrefix(u.Path, "/") {
		return location // relative to the page, which is below already
	}
	rest := "/" + strings.TrimPrefix(u.EscapedPath(), "/")
	if u.RawQuery != "" {
		rest += "?" + u.RawQuery
	}
	if u.Fragment != "" {
		rest += "#" + u.EscapedFragment()
	}
	return to.prefix() + rest
}

// fail answers for a sandbox that did not.
func fail(w http.ResponseWriter, r *http.Request, err error) {
	var fault *reply.Fault
	switch {
	case errors.As(err, &fault):
		reply.Error(w, r, fault)
	case r.Context().Err() != nil:
		// The client has gone; there is nobody to tell.
		w.WriteHeader(http.StatusBadGateway)
	default:
		to := routeOf(r)
		reply.Error(w, r, reply.Errorf(wire.CodeBackendConnectionFailed,
			"The server on port %d of the sandbox broke off the connection: %v.", to.port, err).
			WithHint("Look at the program's output inside the sandbox."))
	}
}
