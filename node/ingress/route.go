// SPDX-License-Identifier: Apache-2.0

// Package ingress is the one door to all sandboxes of a host: it listens once and takes /<id>/<port>/... to the
// sandbox's sockets. Port 44772 is execd's API, 18080 the egress policy's, anything else a server inside.
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

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const (
	execdPort  = 44772
	egressPort = 18080
)

// route is where one request goes.
type route struct {
	id   string
	port int
	// rest is what the sandbox's server sees, still escaped as the client wrote it; it begins with a slash.
	rest string
}

// prefix is what the client wrote in front of rest.
func (r route) prefix() string { return "/" + r.id + "/" + strconv.Itoa(r.port) }

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
	port, ok := parsePort(number)
	if !ok {
		return route{}, reply.Errorf(wire.CodeIngressBadRoute, "The path has no port from 1 to 65535 behind the sandbox id.")
	}
	if slash {
		rest = "/" + rest
	} else {
		rest = "/"
	}
	return route{id, port, rest}, nil
}

// parseAddress is the inverse of address.
func parseAddress(host string) (route, bool) {
	id, number, _ := strings.Cut(host, ".")
	port, ok := parsePort(number)
	return route{id: id, port: port}, ok && isUUID(id)
}

func parsePort(s string) (int, bool) {
	port, err := strconv.ParseUint(s, 10, 16)
	return int(port), err == nil && port > 0 && s[0] != '0' && s[0] != '+'
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
// resolve to 127.0.0.1 carries its own name here, which is how it is found out.
func isLoopbackHost(r *http.Request) bool {
	host := (&url.URL{Host: r.Host}).Hostname()
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || host == "::1" || isLoopbackIPv4(host)
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
