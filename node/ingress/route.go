// SPDX-License-Identifier: Apache-2.0

// Package ingress is the one door to all sandboxes of a host: it listens once and takes each request to a sandbox's
// sockets. Port 44772 is execd's API, 18080 the egress policy's, anything else a server inside.
//
// A request names its sandbox and port in one of three ways, and this is their order:
//
//  1. Host name `<id>-<port>.localhost[:p]`. Every sandbox's port is an origin of its own in a browser. Path, query and
//     answer pass as they are; only cookies are kept from being set for more than this host.
//  2. Header `OpenSandbox-Ingress-To: <id>-<port>`. Path, query and answer pass as they are.
//  3. Path `/<id>/<port>/...`. The server inside sees what comes after the prefix; X-Forwarded-Prefix tells it. All
//     sandboxes share one origin, so pages get a Content-Security-Policy that takes that origin away.
//
// Two that disagree are refused, never resolved: a host name and a header that name different things, or a header and
// a path that begins with the route of something else. Where they agree, the path's prefix is taken off. With a host
// name the path is the server's own, whatever it looks like: a page in a sandbox can write any path, but not the Host.
//
// It holds no secret and adds none: tokens come from the client and are checked by execd. What comes back from a
// sandbox is hostile, and so is every path: ids and ports are parsed to their one canonical form before anything
// touches the file system.
package ingress

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"opensandbox.io/node/portproxy"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const (
	execdPort  = 44772
	egressPort = 18080
)

// routeHeader names the route in a request whose path is the server's own.
const routeHeader = "Opensandbox-Ingress-To"

// way is how a request named its route.
type way int

const (
	byPath way = iota
	byHeader
	byHost
)

// route is where one request goes.
type route struct {
	id   string
	port int
	way  way
	// rest is what the sandbox's server sees, still escaped as the client wrote it; it begins with a slash.
	rest string
	// bare: the path ended behind the port, without a slash.
	bare bool
}

// prefix is what the client wrote in front of rest: nothing unless it is routed by path.
func (r route) prefix() string {
	if r.way != byPath {
		return ""
	}
	return "/" + r.id + "/" + strconv.Itoa(r.port)
}

// name is how header and host name spell it.
func (r route) name() string { return r.id + "-" + strconv.Itoa(r.port) }

func (r route) sameTarget(other route) bool { return r.id == other.id && r.port == other.port }

// findRoute reads where a request goes.
func findRoute(r *http.Request) (route, error) {
	host, hosted, err := parseHost(r.Host)
	if err != nil {
		return route{}, err
	}
	header, headed, err := parseHeader(r.Header.Values(routeHeader))
	if err != nil {
		return route{}, err
	}
	if hosted {
		if headed && !header.sameTarget(host) {
			return route{}, conflict("The host name", host, "the header "+routeHeader, header)
		}
		host.rest = ownPath(r.URL)
		return host, nil
	}
	path, pathErr := parsePath(r.URL)
	if !headed {
		return path, pathErr
	}
	if pathErr == nil {
		if !path.sameTarget(header) {
			return route{}, conflict("The header "+routeHeader, header, "the path", path)
		}
		return path, nil
	}
	header.rest = ownPath(r.URL)
	return header, nil
}

func conflict(first string, a route, second string, b route) error {
	return reply.Errorf(wire.CodeIngressRouteConflict, "%s names %s and %s names %s.", first, a.name(), second, b.name())
}

// ownPath is the whole path, for servers that are at the root of their address.
func ownPath(u *url.URL) string {
	if path := u.EscapedPath(); strings.HasPrefix(path, "/") {
		return path
	}
	return "/"
}

// parseHost reads <id>-<port>.localhost, with or without a port of ours behind it. Names of hosts know no case and may
// end with a dot.
func parseHost(host string) (route, bool, error) {
	label, ok := strings.CutSuffix(hostname(host), ".localhost")
	if !ok {
		return route{}, false, nil
	}
	to, ok, err := parseName(label)
	to.way = byHost
	return to, ok, err
}

func hostname(host string) string {
	return strings.TrimSuffix(strings.ToLower((&url.URL{Host: host}).Hostname()), ".")
}

func parseHeader(values []string) (route, bool, error) {
	if len(values) == 0 {
		return route{}, false, nil
	}
	if len(values) > 1 {
		return route{}, false, reply.Errorf(wire.CodeIngressRouteConflict, "The header %s is there %d times.", routeHeader, len(values))
	}
	to, ok, err := parseName(values[0])
	if err == nil && !ok {
		err = reply.Errorf(wire.CodeIngressBadRoute, "The header %s is not <sandbox id>-<port>.", routeHeader)
	}
	to.way = byHeader
	return to, ok, err
}

// parseName reads <id>-<port>. The published signed form, <id>-<port>-<expiry>-<signature>, is known so that it can be
// refused by name: whoever sends one believes it to be checked.
func parseName(name string) (route, bool, error) {
	if len(name) < 38 || !isUUID(name[:36]) || name[36] != '-' {
		return route{}, false, nil
	}
	number, more, signed := strings.Cut(name[37:], "-")
	port, ok := portproxy.ParsePort(number)
	if ok && signed && strings.Count(more, "-") == 1 {
		return route{}, false, reply.Errorf(wire.CodeIngressSignedRoute, "This is a signed route, which is not checked here.")
	}
	return route{id: name[:36], port: port}, ok && !signed, nil
}

// address names the route as a host name, which is how http.Transport tells pools of connections apart.
func (r route) address() string { return r.id + "." + strconv.Itoa(r.port) }

// parsePath reads /<id>/<port>[/rest]. Only the canonical spelling of id and port is a route: nothing that has to
// be decoded, trimmed or folded first.
func parsePath(u *url.URL) (route, error) {
	id, tail, _ := strings.Cut(strings.TrimPrefix(u.EscapedPath(), "/"), "/")
	number, rest, slash := strings.Cut(tail, "/")
	if !isUUID(id) {
		return route{}, reply.Errorf(wire.CodeIngressBadRoute, "The path does not begin with a sandbox id.")
	}
	port, ok := portproxy.ParsePort(number)
	if !ok {
		return route{}, reply.Errorf(wire.CodeIngressBadRoute, "The path has no port from 1 to 65535 behind the sandbox id.")
	}
	if slash {
		rest = "/" + rest
	} else {
		rest = "/"
	}
	return route{id: id, port: port, rest: rest, bare: !slash}, nil
}

// needsSlash tells requests for the root of a program that have to be made again with a slash at the end: links of its
// page are relative to that. execd has no pages, and who wants an upgrade does not follow redirects.
func (r route) needsSlash(asked *http.Request) bool {
	return r.bare && r.port != execdPort && asked.Header.Get("Upgrade") == "" &&
		(asked.Method == http.MethodGet || asked.Method == http.MethodHead)
}

// withSlash is where such a request goes, relative to its own path: a proxy in front may have put something before it.
func (r route) withSlash(asked *url.URL) string {
	location := strconv.Itoa(r.port) + "/"
	if asked.RawQuery != "" {
		location += "?" + asked.RawQuery
	}
	return location
}

// parseAddress is the inverse of address.
func parseAddress(host string) (route, bool) {
	id, number, _ := strings.Cut(host, ".")
	port, ok := portproxy.ParsePort(number)
	return route{id: id, port: port}, ok && isUUID(id)
}

func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		switch i {
		case 8, 13, 18, 23:
			if c != '-' {
				return false
			}
		default:
			if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
				return false
			}
		}
	}
	return true
}

// isLoopbackHost tells whether a Host header names this machine. A web page of another site that was made to
// resolve to 127.0.0.1 carries its own name here, which is how it is found out. Of the names below localhost only
// those of sandboxes count: nobody else has one there.
func isLoopbackHost(host string) bool {
	name := hostname(host)
	if name == "localhost" || name == "::1" || isLoopbackIPv4(name) {
		return true
	}
	_, ok, err := parseHost(host)
	return ok || err != nil
}

func isLoopbackIPv4(host string) bool {
	parts := strings.Split(host, ".")
	if len(parts) != 4 || parts[0] != "127" {
		return false
	}
	for _, part := range parts[1:] {
		if n, err := strconv.ParseUint(part, 10, 8); err != nil || strconv.FormatUint(n, 10) != part {
			return false
		}
	}
	return true
}
