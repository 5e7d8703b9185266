// SPDX-License-Identifier: Apache-2.0

package execd

import (
	"net/http"
	"slices"
	"strings"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// checkQuery refuses a query parameter that the contract does not have for the route: a misspelt one would be ignored,
// and `attach?ofset=4` would send everything again. Routes that are not in the contract look at theirs themselves.
func checkQuery(pattern string, r *http.Request) error {
	if r.URL.RawQuery == "" {
		return nil
	}
	known, ok := wire.ExecdQuery(operation(pattern, r))
	if !ok {
		return nil
	}
	for name := range r.URL.Query() {
		if slices.Contains(known, name) {
			continue
		}
		fault := reply.Errorf(wire.CodeInvalidQuery, "There is no query parameter %.64q here.", name)
		if len(known) == 0 {
			return fault.WithHint("This route has none.")
		}
		return fault.WithHint("Known are: %s.", strings.Join(known, ", "))
	}
	return nil
}

// operation is what the contract calls a route of the mux.
func operation(pattern string, r *http.Request) string {
	method, path, _ := strings.Cut(pattern, " ")
	path = strings.TrimPrefix(path, "/v1/filesystem/{uid}/{gid}")
	if path == "/command/{first}/{second}" { // three routes, see command.Routes
		path = "/command/{id}/" + r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
		if strings.HasPrefix(r.URL.Path, "/command/status/") {
			path = "/command/status/{id}"
		}
	}
	return method + " " + path
}
