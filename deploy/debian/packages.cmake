# Debian packages: in a folder that is built, `cpack -G DEB`. Takes what
# deploy/packages/package.txt lists.
#
#   quantd          the server, its unit, /etc/quantd/environment, quantd(8)
#   quantctl        the command line client, its manual page and completions
#   libquantd-dev   the C++ client: libraries, headers, protos
#   python3-quantd  the Python client

# What only packages have, and what is made when they are.
set(made ${CMAKE_BINARY_DIR}/debian)
file(MAKE_DIRECTORY ${made})
# make(<component> <command>...)
function(make component)
  list(JOIN ARGN "\" \"" command)
  install(CODE "execute_process(COMMAND \"${command}\"
                WORKING_DIRECTORY \"${PROJECT_SOURCE_DIR}\"
                COMMAND_ERROR_IS_FATAL ANY)"
          COMPONENT ${component} EXCLUDE_FROM_ALL)
endfunction()

make(server help2man --section=8 --no-info
     "--name=calibrate, quantize and keep encodings, over gRPC"
     --output=${made}/quantd.8 $<TARGET_FILE:quantd>)
install(FILES ${made}/quantd.8 DESTINATION ${CMAKE_INSTALL_MANDIR}/man8
        COMPONENT server EXCLUDE_FROM_ALL)
# An absolute folder: /usr/etc is none that anybody looks into.
install(FILES ${CMAKE_CURRENT_LIST_DIR}/quantd/environment
        DESTINATION /etc/quantd COMPONENT server EXCLUDE_FROM_ALL)

make(python /usr/bin/python3 ${CMAKE_CURRENT_LIST_DIR}/unpack_wheel
     ${made}/python)
install(DIRECTORY ${made}/python/ DESTINATION lib/python3/dist-packages
        COMPONENT python EXCLUDE_FROM_ALL)

# compress(<component> <file>): a manual page, as Debian has them.
function(compress component file)
  install(CODE "execute_process(COMMAND gzip --best --no-name --force
                \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/share/man/${file}\"
                COMMAND_ERROR_IS_FATAL ANY)"
          COMPONENT ${component} EXCLUDE_FROM_ALL)
endfunction()
compress(server man8/quantd.8)
compress(client man1/quantctl.1)

# documents(<component> <package> <binary>...): licence, changes, and what the
# binaries were made of.
function(documents component package)
  set(folder ${CMAKE_INSTALL_DATADIR}/doc/${package})
  make(${component} /usr/bin/python3 ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/sbom
       --name ${package} --version ${PROJECT_VERSION}
       --build ${CMAKE_BINARY_DIR} --output ${made}/${package}.spdx.json ${ARGN})
  install(FILES ${made}/${package}.spdx.json DESTINATION ${folder}
          COMPONENT ${component} EXCLUDE_FROM_ALL)
  install(FILES ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/copyright
          DESTINATION ${folder} COMPONENT ${component} EXCLUDE_FROM_ALL)
  install(FILES ${PROJECT_SOURCE_DIR}/deploy/CHANGELOG.md DESTINATION ${folder}
          COMPONENT ${component} EXCLUDE_FROM_ALL)
endfunction()
documents(server quantd $<TARGET_FILE:quantd>)
documents(client quantctl $<TARGET_FILE:quantctl>)
documents(dev libquantd-dev $<TARGET_FILE:quantd_client>)
documents(python python3-quantd)

set(CPACK_GENERATOR DEB)
set(CPACK_COMPONENTS_ALL server client dev python)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
# For /etc.
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_CONTACT "quantd maintainers")
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "quantd maintainers <quantd@example.com>")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_DEBIAN_SERVER_PACKAGE_NAME quantd)
set(CPACK_COMPONENT_SERVER_DESCRIPTION
    "Quantization service\nCalibrates, quantizes, dequantizes and evaluates tensors over gRPC, and keeps\ntheir encodings. Listens on loopback until /etc/quantd/environment says more.")
set(CPACK_DEBIAN_SERVER_PACKAGE_SECTION science)
set(CPACK_DEBIAN_SERVER_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_SERVER_PACKAGE_SUGGESTS quantctl)
set(CPACK_DEBIAN_SERVER_PACKAGE_CONTROL_EXTRA
    ${CMAKE_CURRENT_LIST_DIR}/quantd/conffiles
    ${CMAKE_CURRENT_LIST_DIR}/quantd/postinst
    ${CMAKE_CURRENT_LIST_DIR}/quantd/postrm
    ${CMAKE_CURRENT_LIST_DIR}/quantd/prerm)

set(CPACK_DEBIAN_CLIENT_PACKAGE_NAME quantctl)
set(CPACK_COMPONENT_CLIENT_DESCRIPTION
    "Command line client of the quantization service quantd\nQuantizes, calibrates and evaluates checkpoints, and operates servers.")
set(CPACK_DEBIAN_CLIENT_PACKAGE_SECTION science)
set(CPACK_DEBIAN_CLIENT_PACKAGE_SHLIBDEPS ON)

set(CPACK_DEBIAN_DEV_PACKAGE_NAME libquantd-dev)
set(CPACK_COMPONENT_DEV_DESCRIPTION
    "C++ client of the quantization service quantd\nLibraries, headers and protos.")
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS
    "libabsl-dev, libgrpc++-dev, libprotobuf-dev, libre2-dev, libxxhash-dev, pkg-config")

set(CPACK_DEBIAN_PYTHON_PACKAGE_NAME python3-quantd)
set(CPACK_COMPONENT_PYTHON_DESCRIPTION
    "Python client of the quantization service quantd\nFor numpy arrays, torch tensors and checkpoints.")
set(CPACK_DEBIAN_PYTHON_PACKAGE_SECTION python)
set(CPACK_DEBIAN_PYTHON_PACKAGE_ARCHITECTURE all)
# Stubs are made by the protobuf of this machine and go with its Python runtime.
set(CPACK_DEBIAN_PYTHON_PACKAGE_DEPENDS
    "python3 (>= 3.9), python3-grpcio, python3-numpy, python3-protobuf")
set(CPACK_DEBIAN_PYTHON_PACKAGE_RECOMMENDS python3-xxhash)
set(CPACK_DEBIAN_PYTHON_PACKAGE_SUGGESTS "python3-torch, python3-tqdm")
set(CPACK_DEBIAN_PYTHON_PACKAGE_CONTROL_EXTRA
    ${CMAKE_CURRENT_LIST_DIR}/python3-quantd/postinst
    ${CMAKE_CURRENT_LIST_DIR}/python3-quantd/prerm)
include(CPack)
