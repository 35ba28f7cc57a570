#!/bin/sh
# Install a CUDA-aware Open MPI, made from Debian's source package, beside a Python.
#
#     sh open_mpi.sh PREFIX HEADERS [JOBS]
#
# PREFIX is the environment that it goes into, HEADERS the folder with include/cuda.h in it. Without
# root; OPENMPI_SOURCE names an Open MPI 4.1 (.tar.xz) to take in place of Debian's. It has the
# fewest parts that serve messages between the ranks of one machine.
set -eu
prefix=$(realpath "$1") headers=$(realpath "$2") jobs=${3:-$(nproc)}
source=${OPENMPI_SOURCE:+$(realpath "$OPENMPI_SOURCE")}
folder=$prefix/openmpi
rm -rf "$folder"
mkdir -p "$folder/sources" "$folder/lists/partial" "$folder/archives/partial"
cd "$folder"

if [ -z "$source" ]; then
    command -v apt-get >/dev/null || {
        echo >&2 "no apt-get: name Open MPI's source by OPENMPI_SOURCE"
        exit 1
    }
    cat > sources/source.sources <<-END
	Types: deb-src
	URIs: http://deb.debian.org/debian
	Suites: bookworm
	Components: main
	Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
	END
    apt() {
        apt-get -qq -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$folder/sources" \
            -o Dir::State::Lists="$folder/lists" -o Dir::Cache="$folder" \
            -o APT::Sandbox::User="$(id -un)" "$@"
    }
    apt update
    apt source --download-only openmpi >/dev/null
    source=$(echo openmpi_4.*.orig.tar.xz)
fi
mkdir source
tar -xJf "$source" -C source --strip-components=1
cd source

unset MAKEFLAGS MFLAGS # whoever calls this has other variables
leave_out=btl-openib,btl-uct,btl-usnic,crs,mtl,pml-cm,vprotocol,topo-treematch
leave_out=$leave_out,common-monitoring,coll-monitoring,osc-monitoring,pml-monitoring
{
    # What is left out needs libraries, or is never asked for: networks, files, Fortran.
    ./configure --prefix="$prefix" --with-cuda="$headers" CFLAGS='-O2 -w' \
        --with-hwloc=internal --with-libevent=internal --with-pmix=internal --without-slurm \
        --without-verbs --without-ofi --without-ucx --without-psm --without-psm2 \
        --disable-mpi-fortran --disable-oshmem --disable-io-romio --disable-io-ompio \
        --disable-hwloc-pci --disable-dependency-tracking --enable-mca-no-build=$leave_out &&
    make -j "$jobs" &&
    make install
} > "$folder/log" 2>&1 || {
    tail -n 20 "$folder/log" >&2
    echo >&2 "see $folder/log"
    exit 1
}
rm -rf "$folder/source" "$folder/lists"
